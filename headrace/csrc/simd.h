// Vectors of float32 lanes, the same words at every level: W lanes in an F, comparisons give an M,
// int32 lanes lie in an I. avx512 and portable have 16 lanes and so share the shape of every kernel
// loop; avx2 has 8. Arithmetic rounds each operation; `fma` is the only fused one, and on the
// portable level it is a multiplication and an addition.
#pragma once
#include <cstdint>
#include <cstring>

#include "level.h"

namespace hr {
namespace HR_LEVEL {

// IEEE half precision by hand, rounded to nearest even: for levels and tails without an
// instruction.
HR_INLINE float half_to_float(uint16_t half) {
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 5.192296858534828e+33f;  // 2^112; exact, also for subnormal halves
  std::memcpy(&bits, &value, 4);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

HR_INLINE uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u)
    return static_cast<uint16_t>(sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u));
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded half in the low bits
    float small;
    std::memcpy(&small, &bits, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | (bits >> 13));
}

HR_INLINE float bfloat_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

}  // namespace HR_LEVEL
}  // namespace hr

#if defined(HR_LEVEL_AVX512)
#include "simd_avx512.h"
#elif defined(HR_LEVEL_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace hr {
namespace HR_LEVEL {

HR_INLINE F load(const uint16_t *half) { return load_f16(half); }
HR_INLINE F load(const int8_t *value) { return load_i8(value); }

// The first n < W values from memory, zeros behind them, and the reverse. For the ends of rows.
template <class T>
HR_INLINE F load_part(const T *from, int n) {
  alignas(64) T part[W] = {};
  std::memcpy(part, from, sizeof(T) * n);
  return load(part);
}
HR_INLINE void store_part(float *to, F value, int n) {
  alignas(64) float part[W];
  store(part, value);
  std::memcpy(to, part, sizeof(float) * n);
}

// The same value in every lane, for templates over F and Many.
template <class V>
struct Fill {
  static HR_INLINE V all(float a) { return set(a); }
};
template <class V>
HR_INLINE V fill(float a) {
  return Fill<V>::all(a);
}

// p * 2^n for whole n, as long as the result is a normal number.
HR_INLINE F times_power(F p, F n) { return as_float(as_int(p) + shift_left<23>(to_int(n))); }

// N vectors that go through the same operations side by side. An elementary function is one chain
// of dependent operations; a core's scheduler does not reach past one chain to the next.
template <int N>
struct Many {
  F v[N];
};
template <int N>
struct ManyMasks {
  M v[N];
};
template <int N>
struct Fill<Many<N>> {
  static HR_INLINE Many<N> all(float a) {
    Many<N> out;
    for (int k = 0; k < N; k++) out.v[k] = set(a);
    return out;
  }
};
template <int N, class Each>
HR_INLINE Many<N> many(Each each) {
  Many<N> out;
#pragma GCC unroll 4
  for (int k = 0; k < N; k++) out.v[k] = each(k);
  return out;
}
template <int N>
HR_INLINE Many<N> operator+(Many<N> a, Many<N> b) {
  return many<N>([&](int k) { return a.v[k] + b.v[k]; });
}
template <int N>
HR_INLINE Many<N> operator-(Many<N> a, Many<N> b) {
  return many<N>([&](int k) { return a.v[k] - b.v[k]; });
}
template <int N>
HR_INLINE Many<N> operator*(Many<N> a, Many<N> b) {
  return many<N>([&](int k) { return a.v[k] * b.v[k]; });
}
template <int N>
HR_INLINE Many<N> operator/(Many<N> a, Many<N> b) {
  return many<N>([&](int k) { return a.v[k] / b.v[k]; });
}
template <int N>
HR_INLINE Many<N> fma(Many<N> a, Many<N> b, Many<N> c) {
  return many<N>([&](int k) { return fma(a.v[k], b.v[k], c.v[k]); });
}
template <int N>
HR_INLINE Many<N> max(Many<N> a, Many<N> b) {
  return many<N>([&](int k) { return max(a.v[k], b.v[k]); });
}
template <int N>
HR_INLINE Many<N> min(Many<N> a, Many<N> b) {
  return many<N>([&](int k) { return min(a.v[k], b.v[k]); });
}
template <int N>
HR_INLINE Many<N> round(Many<N> a) {
  return many<N>([&](int k) { return round(a.v[k]); });
}
template <int N>
HR_INLINE Many<N> abs(Many<N> a) {
  return many<N>([&](int k) { return abs(a.v[k]); });
}
template <int N>
HR_INLINE Many<N> times_power(Many<N> p, Many<N> n) {
  return many<N>([&](int k) { return times_power(p.v[k], n.v[k]); });
}
template <int N>
HR_INLINE ManyMasks<N> operator<(Many<N> a, Many<N> b) {
  ManyMasks<N> out;
  for (int k = 0; k < N; k++) out.v[k] = a.v[k] < b.v[k];
  return out;
}
template <int N>
HR_INLINE Many<N> select(ManyMasks<N> m, Many<N> yes, Many<N> no) {
  return many<N>([&](int k) { return select(m.v[k], yes.v[k], no.v[k]); });
}

}  // namespace HR_LEVEL
}  // namespace hr
