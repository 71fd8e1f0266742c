// Four groups of quantize.cpp at a time, with AVX2: the maxima and the sums of the groups, most of
// the work on one group, share their shuffles. The bits are those of one group after another.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "level.h"

namespace hr {
namespace HR_LEVEL {

constexpr int kGroupsTogether = 4;

// Where the results of a row go (QuantizedRow of linear.h); half sums only where they are wanted.
struct QuantizedAt {
  int8_t *bytes;
  float *scale, *sum;
  int32_t *whole;
  float *half_sum;
  int32_t *half_whole;
  bool halves;
};

// The largest of eight lanes, for each of the four.
HR_INLINE __m128 highest_of_each(const __m256 (&x)[4]) {
  const __m256 even = _mm256_max_ps(_mm256_permute2f128_ps(x[0], x[2], 0x20),
                                    _mm256_permute2f128_ps(x[0], x[2], 0x31));
  const __m256 odd = _mm256_max_ps(_mm256_permute2f128_ps(x[1], x[3], 0x20),
                                   _mm256_permute2f128_ps(x[1], x[3], 0x31));
  const __m256 pairs =
      _mm256_max_ps(_mm256_shuffle_ps(even, odd, 0x88), _mm256_shuffle_ps(even, odd, 0xdd));
  const __m256 all = _mm256_max_ps(pairs, _mm256_permute_ps(pairs, 0xb1));
  return _mm_shuffle_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1), 0x88);
}

HR_INLINE __m128i add_lanes(__m256i x) {
  return _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

// One of the four groups: bytes out; returns partial sums of the first half of the group in lanes 0,
// 1, 4, 5 and of the second half in the others.
HR_INLINE __m256i quantize_group(const float *x, __m256 inverse, int8_t *bytes) {
  __m256i part[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    part[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inverse));
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(part[0], part[1]),
                                           _mm256_packs_epi32(part[2], part[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes),
                      _mm256_permutevar8x32_epi32(mixed, order));
  return _mm256_hadd_epi32(_mm256_add_epi32(part[0], part[1]),
                           _mm256_add_epi32(part[2], part[3]));
}

// Groups [group, group + 4) of the row x.
HR_INLINE void quantize_together(const float *x, int32_t group, const QuantizedAt &to) {
  x += 32 * group;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 most[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    __m256 part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      part[i] = _mm256_andnot_ps(sign, _mm256_loadu_ps(x + 32 * g + 8 * i));
    most[g] = _mm256_max_ps(_mm256_max_ps(part[0], part[1]), _mm256_max_ps(part[2], part[3]));
  }
  const __m128 top = highest_of_each(most), limit = _mm_set1_ps(127.0f);
  const __m128 scale = _mm_div_ps(top, limit);
  const __m128 inverse =
      _mm_and_ps(_mm_div_ps(limit, top), _mm_cmpgt_ps(top, _mm_setzero_ps()));
  const __m256 both = _mm256_set_m128(inverse, inverse);
  int8_t *bytes = to.bytes + 32 * group;
  const __m256i a = quantize_group(x, _mm256_permute_ps(both, 0x00), bytes);
  const __m256i b = quantize_group(x + 32, _mm256_permute_ps(both, 0x55), bytes + 32);
  const __m256i c = quantize_group(x + 64, _mm256_permute_ps(both, 0xaa), bytes + 64);
  const __m256i d = quantize_group(x + 96, _mm256_permute_ps(both, 0xff), bytes + 96);
  // Sums of half groups: of the first two groups, of the last two.
  const __m128i first = add_lanes(_mm256_hadd_epi32(a, b));
  const __m128i last = add_lanes(_mm256_hadd_epi32(c, d));
  const __m128i whole = _mm_hadd_epi32(first, last);
  _mm_storeu_ps(to.scale + group, scale);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to.whole + group), whole);
  _mm_storeu_ps(to.sum + group, _mm_mul_ps(scale, _mm_cvtepi32_ps(whole)));
  if (!to.halves) return;
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to.half_whole + 2 * group), first);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to.half_whole + 2 * group + 4), last);
  _mm_storeu_ps(to.half_sum + 2 * group,
                _mm_mul_ps(_mm_unpacklo_ps(scale, scale), _mm_cvtepi32_ps(first)));
  _mm_storeu_ps(to.half_sum + 2 * group + 4,
                _mm_mul_ps(_mm_unpackhi_ps(scale, scale), _mm_cvtepi32_ps(last)));
}

}  // namespace HR_LEVEL
}  // namespace hr
