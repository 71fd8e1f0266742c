// simd.h for the avx512 level.
#pragma once

namespace hr {
namespace HR_LEVEL {

constexpr int W = 16;
struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};

HR_INLINE F load(const float *p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float *p, F a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE F set(float a) { return {_mm512_set1_ps(a)}; }
HR_INLINE F zero() { return {_mm512_setzero_ps()}; }
HR_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE F round(F a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
HR_INLINE F abs(F a) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
}

// For pairs (x[2i], x[2i + 1]): exchanged; the first of each negated; W / 2 values, each twice.
HR_INLINE F swap_pairs(F a) { return {_mm512_shuffle_ps(a.v, a.v, 0xB1)}; }
HR_INLINE F negate_even(F a) {
  return {_mm512_castsi512_ps(
      _mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi64(0x80000000)))};
}
HR_INLINE F load_twice(const float *p) {
  const __m512i index = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return {_mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(p)))};
}

HR_INLINE M operator<(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
HR_INLINE M operator<=(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
HR_INLINE M operator==(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
HR_INLINE F select(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
HR_INLINE uint32_t bits(M m) { return static_cast<uint32_t>(m.v); }
// Lane i from bit i of a word.
HR_INLINE M mask(uint32_t word) { return {static_cast<__mmask16>(word)}; }

HR_INLINE I iset(int32_t a) { return {_mm512_set1_epi32(a)}; }
HR_INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
HR_INLINE I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
HR_INLINE I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
HR_INLINE I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
HR_INLINE I shift_left(I a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
HR_INLINE I shift_right(I a) {
  return {_mm512_srai_epi32(a.v, N)};
}
HR_INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
HR_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
HR_INLINE I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
HR_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
HR_INLINE void store(int32_t *p, I a) { _mm512_storeu_si512(p, a.v); }

HR_INLINE F load_f16(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
HR_INLINE void store_f16(uint16_t *p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HR_INLINE F load_i8(const int8_t *p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
}
HR_INLINE F load_bf16(const uint16_t *p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16))};
}

HR_INLINE float reduce_add(F a) {
  const __m256 low = _mm512_castps512_ps256(a.v);
  const __m256 high =
      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 eight = _mm256_add_ps(low, high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
HR_INLINE float reduce_max(F a) {
  const __m256 low = _mm512_castps512_ps256(a.v);
  const __m256 high =
      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 eight = _mm256_max_ps(low, high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

}  // namespace HR_LEVEL
}  // namespace hr
