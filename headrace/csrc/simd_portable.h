// simd.h in plain C++ with the compiler's generic vectors: 16 lanes as four quarters, which any
// 128-bit vector unit (SSE2, NEON) takes as they are.
#pragma once
#include <cmath>

namespace hr {
namespace HR_LEVEL {

constexpr int W = 16;
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t IntQuarter __attribute__((vector_size(16)));
struct F {
  Quarter a, b, c, d;
};
struct I {
  IntQuarter a, b, c, d;
};
struct M {
  IntQuarter a, b, c, d;
};

template <class V>
HR_INLINE V load_quarter(const void *p) {
  V out;
  std::memcpy(&out, p, 16);
  return out;
}
template <class V>
HR_INLINE void store_quarter(void *p, V value) {
  std::memcpy(p, &value, 16);
}
HR_INLINE Quarter spread(float a) { return Quarter{a, a, a, a}; }
HR_INLINE Quarter pick(IntQuarter m, Quarter yes, Quarter no) {
  return (Quarter)((m & (IntQuarter)yes) | (~m & (IntQuarter)no));
}
// As max and min of the other levels: the second operand where one is not a number.
HR_INLINE Quarter larger(Quarter a, Quarter b) { return pick(a > b, a, b); }
HR_INLINE Quarter smaller(Quarter a, Quarter b) { return pick(a < b, a, b); }
// To the nearest integer, ties to even, for |a| < 2^22; larger values are integers, or near one.
HR_INLINE Quarter nearest(Quarter a) { return (a + 12582912.0f) - 12582912.0f; }
HR_INLINE IntQuarter integers(Quarter a) {
  return (IntQuarter)(a + 12582912.0f) - (IntQuarter)spread(12582912.0f);
}

HR_INLINE F load(const float *p) {
  return {load_quarter<Quarter>(p), load_quarter<Quarter>(p + 4), load_quarter<Quarter>(p + 8),
          load_quarter<Quarter>(p + 12)};
}
HR_INLINE void store(float *p, F x) {
  store_quarter(p, x.a);
  store_quarter(p + 4, x.b);
  store_quarter(p + 8, x.c);
  store_quarter(p + 12, x.d);
}
HR_INLINE F set(float a) { return {spread(a), spread(a), spread(a), spread(a)}; }
HR_INLINE F zero() { return set(0.0f); }
HR_INLINE F operator+(F x, F y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
HR_INLINE F operator-(F x, F y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
HR_INLINE F operator*(F x, F y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
HR_INLINE F operator/(F x, F y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
HR_INLINE F fma(F x, F y, F z) { return x * y + z; }
HR_INLINE F max(F x, F y) {
  return {larger(x.a, y.a), larger(x.b, y.b), larger(x.c, y.c), larger(x.d, y.d)};
}
HR_INLINE F min(F x, F y) {
  return {smaller(x.a, y.a), smaller(x.b, y.b), smaller(x.c, y.c), smaller(x.d, y.d)};
}
HR_INLINE F round(F x) { return {nearest(x.a), nearest(x.b), nearest(x.c), nearest(x.d)}; }

// For pairs (x[2i], x[2i + 1]): exchanged; the first of each negated; W / 2 values, each twice.
HR_INLINE Quarter exchange(Quarter a) { return Quarter{a[1], a[0], a[3], a[2]}; }
HR_INLINE F swap_pairs(F x) { return {exchange(x.a), exchange(x.b), exchange(x.c), exchange(x.d)}; }
HR_INLINE F negate_even(F x) {
  const IntQuarter sign = {INT32_MIN, 0, INT32_MIN, 0};
  return {(Quarter)((IntQuarter)x.a ^ sign), (Quarter)((IntQuarter)x.b ^ sign),
          (Quarter)((IntQuarter)x.c ^ sign), (Quarter)((IntQuarter)x.d ^ sign)};
}
HR_INLINE F load_twice(const float *p) {
  return {Quarter{p[0], p[0], p[1], p[1]}, Quarter{p[2], p[2], p[3], p[3]},
          Quarter{p[4], p[4], p[5], p[5]}, Quarter{p[6], p[6], p[7], p[7]}};
}

HR_INLINE M operator<(F x, F y) { return {x.a < y.a, x.b < y.b, x.c < y.c, x.d < y.d}; }
HR_INLINE M operator<=(F x, F y) { return {x.a <= y.a, x.b <= y.b, x.c <= y.c, x.d <= y.d}; }
HR_INLINE M operator==(F x, F y) { return {x.a == y.a, x.b == y.b, x.c == y.c, x.d == y.d}; }
HR_INLINE F select(M m, F yes, F no) {
  return {pick(m.a, yes.a, no.a), pick(m.b, yes.b, no.b), pick(m.c, yes.c, no.c),
          pick(m.d, yes.d, no.d)};
}
HR_INLINE uint32_t quarter_bits(IntQuarter m) {
  const IntQuarter hit = m & IntQuarter{1, 2, 4, 8};
  return static_cast<uint32_t>(hit[0] | hit[1] | hit[2] | hit[3]);
}
HR_INLINE uint32_t bits(M m) {
  return quarter_bits(m.a) | quarter_bits(m.b) << 4 | quarter_bits(m.c) << 8 |
         quarter_bits(m.d) << 12;
}
// Lane i from bit i of a word.
HR_INLINE M mask(uint32_t word) {
  const int32_t w = static_cast<int32_t>(word);
  const IntQuarter all = {w, w, w, w};
  const IntQuarter a = {1, 2, 4, 8}, b = a << 4, c = a << 8, d = a << 12;
  return {(all & a) == a, (all & b) == b, (all & c) == c, (all & d) == d};
}

HR_INLINE I iset(int32_t a) {
  const IntQuarter q = {a, a, a, a};
  return {q, q, q, q};
}
HR_INLINE I operator+(I x, I y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
HR_INLINE I operator-(I x, I y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
HR_INLINE I operator&(I x, I y) { return {x.a & y.a, x.b & y.b, x.c & y.c, x.d & y.d}; }
HR_INLINE I operator|(I x, I y) { return {x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d}; }
template <int N>
HR_INLINE I shift_left(I x) {
  return {x.a << N, x.b << N, x.c << N, x.d << N};
}
template <int N>
HR_INLINE I shift_right(I x) {
  return {x.a >> N, x.b >> N, x.c >> N, x.d >> N};
}
// Nearest integers, ties to even, of |x| < 2^22.
HR_INLINE I to_int(F x) { return {integers(x.a), integers(x.b), integers(x.c), integers(x.d)}; }
HR_INLINE F to_float(I x) {
  return {__builtin_convertvector(x.a, Quarter), __builtin_convertvector(x.b, Quarter),
          __builtin_convertvector(x.c, Quarter), __builtin_convertvector(x.d, Quarter)};
}
HR_INLINE I as_int(F x) {
  return {(IntQuarter)x.a, (IntQuarter)x.b, (IntQuarter)x.c, (IntQuarter)x.d};
}
HR_INLINE F as_float(I x) { return {(Quarter)x.a, (Quarter)x.b, (Quarter)x.c, (Quarter)x.d}; }
HR_INLINE F abs(F x) { return as_float(as_int(x) & iset(0x7fffffff)); }
HR_INLINE void store(int32_t *p, I x) {
  store_quarter(p, x.a);
  store_quarter(p + 4, x.b);
  store_quarter(p + 8, x.c);
  store_quarter(p + 12, x.d);
}

// Four halves, already widened to 32 bits, as floats (see half_to_float).
HR_INLINE Quarter halves(IntQuarter h) {
  const IntQuarter magnitude = h & 0x7fff;
  const Quarter scaled = (Quarter)(magnitude << 13) * 5.192296858534828e+33f;
  const IntQuarter special = (magnitude > 0x7bff) & 0x7f800000;
  return (Quarter)((IntQuarter)scaled | special | ((h & 0x8000) << 16));
}
HR_INLINE IntQuarter widen(const uint16_t *p) { return IntQuarter{p[0], p[1], p[2], p[3]}; }
HR_INLINE F load_f16(const uint16_t *p) {
  return {halves(widen(p)), halves(widen(p + 4)), halves(widen(p + 8)), halves(widen(p + 12))};
}
HR_INLINE void store_f16(uint16_t *p, F x) {
  float value[W];
  store(value, x);
  for (int i = 0; i < W; i++) p[i] = float_to_half(value[i]);
}
HR_INLINE Quarter widen(const int8_t *p) {
  return __builtin_convertvector((IntQuarter{p[0], p[1], p[2], p[3]}), Quarter);
}
HR_INLINE F load_i8(const int8_t *p) {
  return {widen(p), widen(p + 4), widen(p + 8), widen(p + 12)};
}
HR_INLINE F load_bf16(const uint16_t *p) {
  return {(Quarter)(widen(p) << 16), (Quarter)(widen(p + 4) << 16), (Quarter)(widen(p + 8) << 16),
          (Quarter)(widen(p + 12) << 16)};
}

HR_INLINE float reduce_add(F x) {
  const Quarter s = (x.a + x.c) + (x.b + x.d);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
HR_INLINE float reduce_max(F x) {
  const Quarter s = larger(larger(x.a, x.c), larger(x.b, x.d));
  const float even = s[0] > s[2] ? s[0] : s[2], odd = s[1] > s[3] ? s[1] : s[3];
  return even > odd ? even : odd;
}

}  // namespace HR_LEVEL
}  // namespace hr
