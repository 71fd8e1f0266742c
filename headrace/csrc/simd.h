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

}  // namespace HR_LEVEL
}  // namespace hr
