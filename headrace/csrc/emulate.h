// The AVX-512 intrinsics that SIMDe lacks, made of their 256-bit halves. Included by level.h where
// the avx512 level is emulated.
#pragma once
#include <cstdint>

inline simde__m256 hr_high(simde__m512 x) {
  return simde_mm256_castpd_ps(simde_mm512_extractf64x4_pd(simde_mm512_castps_pd(x), 1));
}
inline simde__m512 hr_join(simde__m256 low, simde__m256 high) {
  return simde_mm512_castpd_ps(simde_mm512_insertf64x4(
      simde_mm512_castps_pd(simde_mm512_castps256_ps512(low)), simde_mm256_castps_pd(high), 1));
}
inline simde__m256i hr_high(simde__m512i x) { return simde_mm512_extracti64x4_epi64(x, 1); }
inline simde__m512i hr_join(simde__m256i low, simde__m256i high) {
  return simde_mm512_inserti64x4(simde_mm512_castsi256_si512(low), high, 1);
}

inline simde__m512i hr_cvtps_epi32(simde__m512 x) {
  return hr_join(simde_mm256_cvtps_epi32(simde_mm512_castps512_ps256(x)),
                 simde_mm256_cvtps_epi32(hr_high(x)));
}
inline simde__m512 hr_cvtepi32_ps(simde__m512i x) {
  return hr_join(simde_mm256_cvtepi32_ps(simde_mm512_castsi512_si256(x)),
                 simde_mm256_cvtepi32_ps(hr_high(x)));
}
inline simde__m512i hr_cvtepi8_epi32(simde__m128i x) {
  return hr_join(simde_mm256_cvtepi8_epi32(x),
                 simde_mm256_cvtepi8_epi32(simde_mm_srli_si128(x, 8)));
}
inline simde__m512i hr_cvtepu16_epi32(simde__m256i x) {
  return hr_join(simde_mm256_cvtepu16_epi32(simde_mm256_castsi256_si128(x)),
                 simde_mm256_cvtepu16_epi32(simde_mm256_extracti128_si256(x, 1)));
}
inline simde__m512 hr_cvtph_ps(simde__m256i x) {
  return hr_join(simde_mm256_cvtph_ps(simde_mm256_castsi256_si128(x)),
                 simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(x, 1)));
}
inline simde__m256i hr_cvtps_ph(simde__m512 x) {
  const simde__m128i low = simde_mm256_cvtps_ph(simde_mm512_castps512_ps256(x), 0);
  return simde_mm256_inserti128_si256(simde_mm256_castsi128_si256(low),
                                      simde_mm256_cvtps_ph(hr_high(x), 0), 1);
}
template <int N>
inline simde__m512i hr_srai_epi32(simde__m512i x) {
  return hr_join(simde_mm256_srai_epi32(simde_mm512_castsi512_si256(x), N),
                 simde_mm256_srai_epi32(hr_high(x), N));
}
inline int32_t hr_reduce_add_epi32(simde__m512i x) {
  alignas(64) int32_t lane[16];
  simde_mm512_storeu_si512(lane, x);
  int32_t sum = 0;
  for (int32_t value : lane) sum += value;
  return sum;
}
inline float hr_reduce_max_ps(simde__m512 x) {
  alignas(64) float lane[16];
  simde_mm512_storeu_ps(lane, x);
  float most = lane[0];
  for (float value : lane) most = value > most ? value : most;
  return most;
}

#define _mm512_cvtps_epi32(x) hr_cvtps_epi32(x)
#define _mm512_cvtepi32_ps(x) hr_cvtepi32_ps(x)
#define _mm512_cvtepi8_epi32(x) hr_cvtepi8_epi32(x)
#define _mm512_cvtepu16_epi32(x) hr_cvtepu16_epi32(x)
#define _mm512_cvtph_ps(x) hr_cvtph_ps(x)
#define _mm512_cvtps_ph(x, rounding) hr_cvtps_ph(x)
#define _mm512_srai_epi32(x, count) hr_srai_epi32<count>(x)
#define _mm512_reduce_add_epi32(x) hr_reduce_add_epi32(x)
#define _mm512_reduce_max_ps(x) hr_reduce_max_ps(x)
