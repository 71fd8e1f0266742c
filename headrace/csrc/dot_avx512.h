// dot.h with AVX-512 VNNI: one 64-byte register for the sixteen columns.
#pragma once
#include <cstdint>
#include <cstring>

#include "level.h"

namespace hr {
namespace HR_LEVEL {
namespace dot {

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {
  __m512i v;
};
// Four activations, repeated in every lane.
struct Quad {
  __m512i v;
};

HR_INLINE Floats zero() { return {_mm512_setzero_ps()}; }
HR_INLINE Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE Floats load(const float *p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float *p, Floats x) { _mm512_storeu_ps(p, x.v); }
HR_INLINE Floats load_half(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
HR_INLINE Floats load_brain(const uint16_t *p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
HR_INLINE Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE Floats maximum(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
// a * b + c, rounded once where the level has fused multiply-adds.
HR_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE float highest(Floats a) { return _mm512_reduce_max_ps(a.v); }
HR_INLINE Floats to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Sixteen values rounded to nearest even, as signed bytes; returns their sum.
HR_INLINE int32_t store_bytes(int8_t *p, Floats x) {
  __m512i whole = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}

HR_INLINE Bytes load_bytes(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE Bytes low_nibbles(Bytes b) {
  return {_mm512_and_si512(b.v, _mm512_set1_epi8(15))};
}
HR_INLINE Bytes high_nibbles(Bytes b) {
  return {_mm512_and_si512(_mm512_srli_epi16(b.v, 4), _mm512_set1_epi8(15))};
}
HR_INLINE Quad load_quad(const int8_t *p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
HR_INLINE Floats load_signed(const int8_t *p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw))};
}
HR_INLINE Bytes either(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
// table[b] for each byte, which is below 16.
HR_INLINE Bytes look_up(const int8_t *table, Bytes b) {
  __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), b.v)};
}
// The bits `Mask` of each byte from place `From` on, moved to place `To`.
template <int From, int To, int Mask>
HR_INLINE Bytes moved(Bytes b) {
  __m512i v = From < To ? _mm512_slli_epi16(b.v, From < To ? To - From : 0)
                        : _mm512_srli_epi16(b.v, From < To ? 0 : From - To);
  return {_mm512_and_si512(v, _mm512_set1_epi8(Mask << To))};
}

struct NarrowSum {
  static constexpr bool kWhole = false;
  __m512i v;
  HR_INLINE void begin(int32_t) { v = _mm512_setzero_si512(); }
  HR_INLINE void add(Bytes w, Quad x) { v = _mm512_dpbusd_epi32(v, w.v, x.v); }
  HR_INLINE Ints total() const { return {v}; }
};
// Unsigned weights less an offset, which begin() takes off with the sum of the group's activations.
template <int Offset>
struct MiddleSum {
  static constexpr bool kWhole = Offset != 0;
  __m512i v;
  HR_INLINE void begin(int32_t activations) { v = _mm512_set1_epi32(-Offset * activations); }
  HR_INLINE void add(Bytes w, Quad x) { v = _mm512_dpbusd_epi32(v, w.v, x.v); }
  HR_INLINE Ints total() const { return {v}; }
};
// Signed weights are offset by 128 to unsigned ones; begin() takes that back.
struct WideSum {
  static constexpr bool kWhole = true;
  __m512i v;
  HR_INLINE void begin(int32_t activations) { v = _mm512_set1_epi32(-128 * activations); }
  HR_INLINE void add(Bytes w, Quad x) {
    __m512i offset = _mm512_xor_si512(w.v, _mm512_set1_epi8(static_cast<char>(0x80)));
    v = _mm512_dpbusd_epi32(v, offset, x.v);
  }
  HR_INLINE Ints total() const { return {v}; }
};

}  // namespace dot
}  // namespace HR_LEVEL
}  // namespace hr
