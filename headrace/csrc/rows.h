// What the kernels that work on whole rows share: pieces of rows, and sums over a row.
#pragma once
#include "runtime.h"
#include "simd.h"

namespace hr {
namespace HR_LEVEL {

// Values that one piece of a row kernel should read: some 10 us of work.
constexpr int32_t kPieceValues = 32768;

HR_INLINE int32_t rows_a_piece(int32_t width) {
  return width >= kPieceValues ? 1 : kPieceValues / width;
}

HR_INLINE int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
HR_INLINE int32_t lesser(int32_t a, int32_t b) { return a < b ? a : b; }
HR_INLINE int32_t greater(int32_t a, int32_t b) { return a > b ? a : b; }

// sum of (x - mean)^2, in an order that the width alone decides.
HR_INLINE float sum_squares(const float *x, int32_t width, float mean) {
  const F shift = set(mean);
  F sum[4] = {zero(), zero(), zero(), zero()};
  int32_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W)
    for (int k = 0; k < 4; k++) {
      const F v = load(x + i + k * W) - shift;
      sum[k] = fma(v, v, sum[k]);
    }
  for (; i + W <= width; i += W) {
    const F v = load(x + i) - shift;
    sum[0] = fma(v, v, sum[0]);
  }
  float total = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; i < width; i++) total += (x[i] - mean) * (x[i] - mean);
  return total;
}

HR_INLINE float sum_values(const float *x, int32_t width) {
  F sum[4] = {zero(), zero(), zero(), zero()};
  int32_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W)
    for (int k = 0; k < 4; k++) sum[k] = sum[k] + load(x + i + k * W);
  for (; i + W <= width; i += W) sum[0] = sum[0] + load(x + i);
  float total = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; i < width; i++) total += x[i];
  return total;
}

// out = (x - mean) * scale * weight + bias; weight and bias may be null, out may be x.
HR_INLINE void scale_row(const float *x, float *out, int32_t width, float mean, float scale,
                         const float *weight, const float *bias) {
  int32_t i = 0;
  const F factor = set(scale), shift = set(mean);
  for (; i + W <= width; i += W) {
    F v = (load(x + i) - shift) * factor;
    if (weight) v = v * load(weight + i);
    if (bias) v = v + load(bias + i);
    store(out + i, v);
  }
  for (; i < width; i++) {
    float v = (x[i] - mean) * scale;
    if (weight) v = v * weight[i];
    if (bias) v = v + bias[i];
    out[i] = v;
  }
}

}  // namespace HR_LEVEL
}  // namespace hr
