// RmsNorm of spec.py: residual addition and norm in one pass over a row that stays in the cache.
#include <cmath>

#include "rows.h"

namespace hr {
namespace HR_LEVEL {
namespace {

class Norm final : public Instruction {
 public:
  explicit Norm(const NormArgs &args) : a_(args) {
    op = "rms_norm";
    path = HR_LEVEL_NAME;
  }

  int32_t pieces(const Step &step) const override {
    return ceil_div(step.tokens, rows_a_piece(a_.width));
  }

  void run(const Step &step, int32_t piece, Scratch &) const override {
    const int32_t rows = rows_a_piece(a_.width);
    const int32_t end = lesser(step.tokens, (piece + 1) * rows);
    for (int32_t row = piece * rows; row < end; row++) norm(row);
  }

  double bytes(const Step &step) const override {
    return 4.0 * step.tokens * a_.width * (a_.residual ? 4 : 2);
  }
  double flops(const Step &step) const override { return 4.0 * step.tokens * a_.width; }

 private:
  void norm(int32_t row) const {
    const int32_t width = a_.width;
    const size_t at = static_cast<size_t>(row) * width;
    const float *x = a_.x + at;
    if (a_.residual) {
      float *residual = a_.residual + at;
      if (a_.kind == NormKind::rms) {
        const float variance = add_squares(residual, x) / static_cast<float>(width);
        const float scale = 1.0f / std::sqrt(variance + a_.eps);
        scale_row(residual, a_.out + at, width, 0.0f, scale, a_.weight, a_.bias);
        return;
      }
      add(residual, x);
      x = residual;
    }
    float *out = a_.out + at;
    if (a_.kind == NormKind::none) {
      if (out != x) std::memcpy(out, x, sizeof(float) * width);
      return;
    }
    const float mean =
        a_.kind == NormKind::layer ? sum_values(x, width) / static_cast<float>(width) : 0.0f;
    const float variance = sum_squares(x, width, mean) / static_cast<float>(width);
    scale_row(x, out, width, mean, 1.0f / std::sqrt(variance + a_.eps), a_.weight, a_.bias);
  }

  // residual += residual_scale * x, rounded after each operation.
  void add(float *residual, const float *x) const {
    const F scale = set(a_.residual_scale);
    int32_t i = 0;
    for (; i + W <= a_.width; i += W) store(residual + i, load(residual + i) + scale * load(x + i));
    for (; i < a_.width; i++) residual[i] += a_.residual_scale * x[i];
  }

  // add(), and sum_squares() of what it leaves, in one pass: the same order, the same bits.
  float add_squares(float *residual, const float *x) const {
    const F scale = set(a_.residual_scale);
    const int32_t width = a_.width;
    F sum[4] = {zero(), zero(), zero(), zero()};
    int32_t i = 0;
    for (; i + 4 * W <= width; i += 4 * W) {
      for (int k = 0; k < 4; k++) {
        const F v = load(residual + i + k * W) + scale * load(x + i + k * W);
        store(residual + i + k * W, v);
        sum[k] = fma(v, v, sum[k]);
      }
    }
    for (; i + W <= width; i += W) {
      const F v = load(residual + i) + scale * load(x + i);
      store(residual + i, v);
      sum[0] = fma(v, v, sum[0]);
    }
    float total = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < width; i++) {
      residual[i] += a_.residual_scale * x[i];
      total += residual[i] * residual[i];
    }
    return total;
  }

  NormArgs a_;
};

}  // namespace

std::unique_ptr<Instruction> make_norm(const NormArgs &args) {
  return std::unique_ptr<Instruction>(new Norm(args));
}

}  // namespace HR_LEVEL
}  // namespace hr
