// The sampler's noise, headrace/ops/noise.py: a counter-based hash.
#pragma once
#include <cmath>
#include <cstdint>

#include "level.h"

namespace hr {
namespace HR_LEVEL {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Noise of one sample point.
class Noise {
 public:
  Noise(uint64_t seed, int32_t choice, int32_t position)
      : key_(mix(mix(seed + kGamma) ^
                 ((static_cast<uint64_t>(static_cast<uint32_t>(choice)) << 32) |
                  static_cast<uint32_t>(position)))) {}

  uint64_t bits(int32_t id) const { return mix(key_ + kGamma * (static_cast<uint64_t>(id) + 1)); }

  // Which of the ids [id, id + 16) have ~bits at most `limit`, as bits of the result.
  uint32_t reach(int32_t id, uint64_t limit) const;

  static double gumbel(uint64_t bits) {
    const double u = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
    return -std::log(-std::log(u));
  }

  // Noise of at least `need` has ~bits at most this: -ln(u) >= 1 - u, so 1 - u <= exp(-need).
  static uint64_t limit(double need) {
    if (need <= 0.001) return ~uint64_t{0};
    return static_cast<uint64_t>(std::exp(-need) * 0x1.001p64) + 4096;
  }

 private:
  uint64_t key_;
};

#if defined(HR_LEVEL_AVX512)

inline __m512i mix(__m512i z) {
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)),
                         _mm512_set1_epi64(static_cast<int64_t>(0xBF58476D1CE4E5B9u)));
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)),
                         _mm512_set1_epi64(static_cast<int64_t>(0x94D049BB133111EBu)));
  return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

inline uint32_t Noise::reach(int32_t id, uint64_t limit) const {
  const __m512i start = _mm512_set1_epi64(
      static_cast<int64_t>(key_ + kGamma * (static_cast<uint64_t>(id) + 1)));
  const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i steps = _mm512_mullo_epi64(lanes, _mm512_set1_epi64(static_cast<int64_t>(kGamma)));
  const __m512i eight = _mm512_set1_epi64(static_cast<int64_t>(8 * kGamma));
  const __m512i least = _mm512_set1_epi64(static_cast<int64_t>(~limit));
  const __m512i low = _mm512_add_epi64(start, steps);
  const uint32_t first = _mm512_cmpge_epu64_mask(mix(low), least);
  return first | static_cast<uint32_t>(
                     _mm512_cmpge_epu64_mask(mix(_mm512_add_epi64(low, eight)), least)) << 8;
}

#elif defined(HR_LEVEL_AVX2)

// The low 64 bits of z * factor.
inline __m256i multiply(__m256i z, uint64_t factor) {
  const __m256i low = _mm256_set1_epi64x(static_cast<int64_t>(factor & 0xffffffffu));
  const __m256i high = _mm256_set1_epi64x(static_cast<int64_t>(factor >> 32));
  const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(z, 32), low),
                                         _mm256_mul_epu32(z, high));
  return _mm256_add_epi64(_mm256_mul_epu32(z, low), _mm256_slli_epi64(cross, 32));
}

inline __m256i mix(__m256i z) {
  z = multiply(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), 0xBF58476D1CE4E5B9u);
  z = multiply(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), 0x94D049BB133111EBu);
  return _mm256_xor_si256(z, _mm256_srli_epi64(z, 31));
}

inline uint32_t Noise::reach(int32_t id, uint64_t limit) const {
  const int64_t step = static_cast<int64_t>(kGamma);
  __m256i at = _mm256_add_epi64(
      _mm256_set1_epi64x(static_cast<int64_t>(key_ + kGamma * (static_cast<uint64_t>(id) + 1))),
      _mm256_setr_epi64x(0, step, static_cast<int64_t>(2 * kGamma),
                         static_cast<int64_t>(3 * kGamma)));
  const __m256i four = _mm256_set1_epi64x(static_cast<int64_t>(4 * kGamma));
  // Unsigned comparison: the sign bit is flipped on both sides.
  const __m256i flip = _mm256_set1_epi64x(INT64_MIN);
  const __m256i least = _mm256_set1_epi64x(static_cast<int64_t>(~limit ^ (uint64_t{1} << 63)));
  uint32_t below = 0;
  for (int part = 0; part < 4; part++) {
    const __m256i under = _mm256_cmpgt_epi64(least, _mm256_xor_si256(mix(at), flip));
    below |= static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(under))) << (4 * part);
    at = _mm256_add_epi64(at, four);
  }
  return ~below & 0xffffu;
}

#else

inline uint32_t Noise::reach(int32_t id, uint64_t limit) const {
  uint32_t out = 0;
  for (int i = 0; i < 16; i++) out |= static_cast<uint32_t>(~bits(id + i) <= limit) << i;
  return out;
}

#endif

}  // namespace HR_LEVEL
}  // namespace hr
