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
      : key_(mix(mix(seed + kGamma) ^ ((static_cast<uint64_t>(static_cast<uint32_t>(choice)) << 32) |
                                       static_cast<uint32_t>(position)))) {}

  uint64_t bits(int32_t id) const { return mix(key_ + kGamma * (static_cast<uint64_t>(id) + 1)); }

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

}  // namespace HR_LEVEL
}  // namespace hr
