// dot.h with AVX2, FMA and F16C: two registers for the sixteen columns.
#pragma once
#include <cstdint>
#include <cstring>

#include "level.h"

namespace hr {
namespace HR_LEVEL {
namespace dot {

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};
struct Quad {
  __m256i v;
};

HR_INLINE Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE Floats broadcast(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
HR_INLINE Floats load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float *p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
HR_INLINE Floats load_half(const uint16_t *p) {
  const __m128i *at = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
HR_INLINE __m256 brain(__m128i raw) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
HR_INLINE Floats load_brain(const uint16_t *p) {
  const __m128i *at = reinterpret_cast<const __m128i *>(p);
  return {brain(_mm_loadu_si128(at)), brain(_mm_loadu_si128(at + 1))};
}
HR_INLINE Floats mul(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
HR_INLINE Floats add(Floats x, Floats y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
HR_INLINE Floats maximum(Floats x, Floats y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
HR_INLINE Floats absolute(Floats x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// a * b + c, rounded once where the level has fused multiply-adds.
HR_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
HR_INLINE float highest(Floats x) {
  __m256 v = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
HR_INLINE Floats to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// Sixteen values rounded to nearest even, as signed bytes; returns their sum.
HR_INLINE int32_t store_bytes(int8_t *p, Floats x) {
  __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
  __m256i pair = _mm256_add_epi32(a, b);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

HR_INLINE Bytes load_bytes(const uint8_t *p) {
  const __m256i *at = reinterpret_cast<const __m256i *>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
HR_INLINE Bytes low_nibbles(Bytes b) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(b.a, mask), _mm256_and_si256(b.b, mask)};
}
HR_INLINE Bytes high_nibbles(Bytes b) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(b.a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(b.b, 4), mask)};
}
HR_INLINE Quad load_quad(const int8_t *p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return {_mm256_set1_epi32(word)};
}
HR_INLINE __m256 eight_signed(const int8_t *p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
HR_INLINE Floats load_signed(const int8_t *p) { return {eight_signed(p), eight_signed(p + 8)}; }
HR_INLINE Bytes either(Bytes x, Bytes y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
// table[b] for each byte, which is below 16.
HR_INLINE Bytes look_up(const int8_t *table, Bytes b) {
  __m256i sixteen =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
  return {_mm256_shuffle_epi8(sixteen, b.a), _mm256_shuffle_epi8(sixteen, b.b)};
}
// The bits `Mask` of each byte from place `From` on, moved to place `To`.
template <int From, int To, int Mask>
HR_INLINE Bytes moved(Bytes b) {
  const auto one = [](__m256i v) {
    v = From < To ? _mm256_slli_epi16(v, From < To ? To - From : 0)
                  : _mm256_srli_epi16(v, From < To ? 0 : From - To);
    return _mm256_and_si256(v, _mm256_set1_epi8(Mask << To));
  };
  return {one(b.a), one(b.b)};
}

// Makes the sum be taken here and now: compilers put off integer additions until all products are made,
// and those do not fit the registers.
HR_INLINE void stay(__m256i &sum) { __asm__("" : "+x"(sum)); }

// Pair sums in 16 bits: 32 products of at most 15 * 127 spread over two lanes stay below 2^15.
struct NarrowSum {
  static constexpr bool kWhole = false;
  __m256i a, b;
  HR_INLINE void begin(int32_t) { a = b = _mm256_setzero_si256(); }
  HR_INLINE void add(Bytes w, Quad x) {
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.a, x.v));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.b, x.v));
    stay(a);
    stay(b);
  }
  HR_INLINE Ints total() const {
    __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)};
  }
};
// Unsigned weights of up to 6 bits less an offset, which begin() takes off with the sum of the group's
// activations: pairs reach 63 * 127 * 2, below 2^15; their sums need 32 bits.
template <int Offset>
struct MiddleSum {
  static constexpr bool kWhole = Offset != 0;
  __m256i a, b;
  HR_INLINE void begin(int32_t activations) { a = b = _mm256_set1_epi32(-Offset * activations); }
  static HR_INLINE __m256i product(__m256i w, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
  }
  HR_INLINE void add(Bytes w, Quad x) {
    a = _mm256_add_epi32(a, product(w.a, x.v));
    b = _mm256_add_epi32(b, product(w.b, x.v));
    stay(a);
    stay(b);
  }
  HR_INLINE Ints total() const { return {a, b}; }
};
// |weight| times the activation with the weight's sign: pairs reach 128 * 127 * 2, below 2^15.
struct WideSum {
  static constexpr bool kWhole = false;
  __m256i a, b;
  HR_INLINE void begin(int32_t) { a = b = _mm256_setzero_si256(); }
  static HR_INLINE __m256i product(__m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  HR_INLINE void add(Bytes w, Quad x) {
    a = _mm256_add_epi32(a, product(w.a, x.v));
    b = _mm256_add_epi32(b, product(w.b, x.v));
    stay(a);
    stay(b);
  }
  HR_INLINE Ints total() const { return {a, b}; }
};

}  // namespace dot
}  // namespace HR_LEVEL
}  // namespace hr
