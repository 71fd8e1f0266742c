// simd.h for the avx2 level (AVX2, FMA, F16C).
#pragma once

namespace hr {
namespace HR_LEVEL {

constexpr int W = 8;
struct F {
  __m256 v;
};
struct I {
  __m256i v;
};
struct M {
  __m256 v;
};

HR_INLINE F load(const float *p) { return {_mm256_loadu_ps(p)}; }
HR_INLINE void store(float *p, F a) { _mm256_storeu_ps(p, a.v); }
HR_INLINE F set(float a) { return {_mm256_set1_ps(a)}; }
HR_INLINE F zero() { return {_mm256_setzero_ps()}; }
HR_INLINE F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
HR_INLINE F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
HR_INLINE F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
HR_INLINE F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
HR_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
HR_INLINE F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
HR_INLINE F round(F a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
HR_INLINE F abs(F a) {
  return {_mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))};
}

// For pairs (x[2i], x[2i + 1]): exchanged; the first of each negated; W / 2 values, each twice.
HR_INLINE F swap_pairs(F a) { return {_mm256_permute_ps(a.v, 0xB1)}; }
HR_INLINE F negate_even(F a) {
  return {_mm256_xor_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi64x(0x80000000)))};
}
HR_INLINE F load_twice(const float *p) {
  return {_mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)),
                                   _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))};
}

HR_INLINE M operator<(F a, F b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
HR_INLINE M operator<=(F a, F b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
HR_INLINE M operator==(F a, F b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
HR_INLINE F select(M m, F yes, F no) { return {_mm256_blendv_ps(no.v, yes.v, m.v)}; }
HR_INLINE uint32_t bits(M m) { return static_cast<uint32_t>(_mm256_movemask_ps(m.v)); }
// Lane i from bit i of a word.
HR_INLINE M mask(uint32_t word) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i hit = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(word)), lane);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(hit, lane))};
}

HR_INLINE I iset(int32_t a) { return {_mm256_set1_epi32(a)}; }
HR_INLINE I operator+(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
HR_INLINE I operator-(I a, I b) { return {_mm256_sub_epi32(a.v, b.v)}; }
HR_INLINE I operator&(I a, I b) { return {_mm256_and_si256(a.v, b.v)}; }
HR_INLINE I operator|(I a, I b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int N>
HR_INLINE I shift_left(I a) {
  return {_mm256_slli_epi32(a.v, N)};
}
template <int N>
HR_INLINE I shift_right(I a) {
  return {_mm256_srai_epi32(a.v, N)};
}
HR_INLINE I to_int(F a) { return {_mm256_cvtps_epi32(a.v)}; }
HR_INLINE F to_float(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
HR_INLINE I as_int(F a) { return {_mm256_castps_si256(a.v)}; }
HR_INLINE F as_float(I a) { return {_mm256_castsi256_ps(a.v)}; }
HR_INLINE void store(int32_t *p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), a.v);
}

HR_INLINE F load_f16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
}
HR_INLINE void store_f16(uint16_t *p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HR_INLINE F load_i8(const int8_t *p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))))};
}
HR_INLINE F load_bf16(const uint16_t *p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16))};
}

HR_INLINE float reduce_add(F a) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
HR_INLINE float reduce_max(F a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

}  // namespace HR_LEVEL
}  // namespace hr
