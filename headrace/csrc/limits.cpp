// What one thread of this machine can sustain at this level: the denominators of every share.
//
// Peak loops keep all their accumulators in registers (a spill would read a third of the peak) and hide
// their inputs from the compiler.
#include <chrono>

#include "dot.h"
#include "linear.h"

namespace hr {
namespace HR_LEVEL {
namespace {

using namespace dot;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Calls run() in batches until `seconds` have passed; returns the calls a second.
template <class Run>
double rate(double seconds, Run run) {
  long calls = 0;
  Clock::time_point start = Clock::now();
  double passed = 0;
  while (passed < seconds) {
    for (int i = 0; i < 16; ++i) run();
    calls += 16;
    passed = since(start);
  }
  return static_cast<double>(calls) / passed;
}

template <class T>
HR_INLINE void keep(T &value) {
  __asm__ volatile("" : "+m"(value));
}

constexpr int kChains = 4;    // 16-column sums in flight
constexpr int kRepeats = 128;  // groups a call

template <class Sum>
double dots(double seconds) {
  alignas(64) uint8_t bytes[256];
  int8_t values[4 * kChains * 8];
  for (int i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i & 7);
  for (int i = 0; i < 4 * kChains * 8; ++i) values[i] = static_cast<int8_t>(i - 64);
  keep(bytes);
  keep(values);
  float total[kColumns];
  double calls = rate(seconds, [&] {
    Floats result = zero();
    const int8_t *x = values;
    Bytes w[2] = {load_bytes(bytes), load_bytes(bytes + 64)};
    for (int i = 0; i < kRepeats; ++i) {
      Sum sum[kChains];
      __asm__ volatile("" : "+r"(x));
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) sum[c].begin(0);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) sum[c].add(w[j % 2], load_quad(x + 4 * (8 * c + j)));
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) result = add(result, to_float(sum[c].total()));
    }
    store(total, result);
    keep(total);
  });
  return calls * kRepeats * kChains * kGroup * kColumns;
}

double dot4(double seconds) { return dots<NarrowSum>(seconds); }
double dot8(double seconds) { return dots<WideSum>(seconds); }

#if defined(HR_LEVEL_AVX512)
constexpr int kFloatChains = 12;
#else
constexpr int kFloatChains = 6;
#endif

double fused(double seconds) {
  float values[kColumns];
  for (int i = 0; i < kColumns; ++i) values[i] = 1.0f + static_cast<float>(i) * 1e-7f;
  keep(values);
  float total[kColumns];
  double calls = rate(seconds, [&] {
    Floats a = load(values), b = load(values);
    Floats sum[kFloatChains];
    for (Floats &s : sum) {
      s = zero();
      keep(s);  // or equal chains would become one
    }
    for (int i = 0; i < 1000; ++i)
#pragma GCC unroll 16
      for (int c = 0; c < kFloatChains; ++c) sum[c] = fma(a, b, sum[c]);
    Floats all = zero();
    for (const Floats &s : sum) all = add(all, s);
    store(total, all);
    keep(total);
  });
  return calls * 1000 * kFloatChains * kColumns;
}

double read(const uint8_t *data, size_t bytes, double seconds) {
  float total[kColumns];
  double passes = 0, passed = 0;
  Clock::time_point start = Clock::now();
  while (passed < seconds || passes == 0) {
    Floats sum[4] = {zero(), zero(), zero(), zero()};
    for (size_t at = 0; at + 256 <= bytes; at += 256)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        sum[i] = maximum(sum[i], load(reinterpret_cast<const float *>(data + at) + 16 * i));
    store(total, maximum(maximum(sum[0], sum[1]), maximum(sum[2], sum[3])));
    keep(total);
    passes += 1;
    passed = since(start);
  }
  return passes * static_cast<double>(bytes) / passed;
}

const Limits kLimits = {dot4, dot8, fused, read};

}  // namespace

const Limits &limits() { return kLimits; }

}  // namespace HR_LEVEL
}  // namespace hr
