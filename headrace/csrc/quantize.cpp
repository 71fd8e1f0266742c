// Activations to signed bytes: per row and group of 32, scale = max |x| / 127, rounded to nearest even.
#include <cstring>

#include "dot.h"
#include "linear_kernels.h"
#if defined(HR_LEVEL_AVX2)
#include "quantize_avx2.h"
#endif

namespace hr {
namespace HR_LEVEL {
namespace {

using namespace dot;

void quantize_row(const float *x, int32_t depth, bool fine, const QuantizedRow &layout, uint8_t *out) {
  int32_t groups = (depth + kGroup - 1) / kGroup;
  auto *bytes = reinterpret_cast<int8_t *>(out);
  auto *scale = reinterpret_cast<float *>(out + layout.scale);
  auto *sum = reinterpret_cast<float *>(out + layout.sum);
  auto *whole = reinterpret_cast<int32_t *>(out + layout.whole);
  auto *half_sum = reinterpret_cast<float *>(out + layout.half_sum);
  auto *half_whole = reinterpret_cast<int32_t *>(out + layout.half_whole);
  int32_t done = 0;
#if defined(HR_LEVEL_AVX2)
  const QuantizedAt to{bytes, scale, sum, whole, half_sum, half_whole, fine};
  // Values ahead that the memory is asked for: rows follow one another.
  constexpr int32_t kAhead = 512;
  const int32_t full = depth / kGroup;
  while (full >= kGroupsTogether && done < full) {
    // The last groups may be done twice.
    if (done > full - kGroupsTogether) done = full - kGroupsTogether;
    for (int32_t i = 0; i < kGroupsTogether * kGroup; i += 16)
      __builtin_prefetch(x + done * kGroup + kAhead + i);
    quantize_together(x, done, to);
    done += kGroupsTogether;
  }
#endif
  for (int32_t g = done; g < groups; ++g) {
    const float *from = x + g * kGroup;
    float part[kGroup];
    if ((g + 1) * kGroup > depth) {
      std::memset(part, 0, sizeof part);
      std::memcpy(part, from, static_cast<size_t>(depth - g * kGroup) * 4);
      from = part;
    }
    Floats low = load(from), high = load(from + 16);
    float most = highest(maximum(absolute(low), absolute(high)));
    Floats inverse = broadcast(most > 0 ? 127.0f / most : 0.0f);
    int32_t first = store_bytes(bytes + g * kGroup, mul(low, inverse));
    int32_t second = store_bytes(bytes + g * kGroup + 16, mul(high, inverse));
    scale[g] = most / 127.0f;
    whole[g] = first + second;
    sum[g] = scale[g] * static_cast<float>(first + second);
    if (fine) {
      half_whole[2 * g] = first;
      half_whole[2 * g + 1] = second;
      half_sum[2 * g] = scale[g] * static_cast<float>(first);
      half_sum[2 * g + 1] = scale[g] * static_cast<float>(second);
    }
  }
}

class Quantize final : public Instruction {
 public:
  explicit Quantize(const LinearArgs &args) : a_(args), layout_(args.weight->groups()) {
    op = a_.logits ? "logits" : "linear";
    path = std::string(HR_LEVEL_NAME) + " quantize";
    rows_a_piece_ = 4096 / a_.weight->depth() + 1;
  }

  int32_t pieces(const Step &step) const override {
    return (rows(step) + rows_a_piece_ - 1) / rows_a_piece_;
  }

  void run(const Step &step, int32_t piece, Scratch &) const override {
    int32_t end = (piece + 1) * rows_a_piece_;
    if (end > rows(step)) end = rows(step);
    for (int32_t row = piece * rows_a_piece_; row < end; ++row) {
      int32_t from = a_.logits ? step.batch->logits_row[row] : row;
      quantize_row(a_.x + static_cast<size_t>(from) * static_cast<size_t>(a_.weight->depth()),
                   a_.weight->depth(), a_.weight->fine(), layout_,
                   a_.quantized + static_cast<size_t>(row) * layout_.bytes);
    }
  }

  double bytes(const Step &step) const override { return 5.0 * rows(step) * a_.weight->depth(); }
  double flops(const Step &step) const override { return 3.0 * rows(step) * a_.weight->depth(); }

 private:
  int32_t rows(const Step &step) const { return a_.logits ? step.logits : step.tokens; }
  LinearArgs a_;
  QuantizedRow layout_;
  int32_t rows_a_piece_;
};

}  // namespace

std::unique_ptr<Instruction> make_quantize(const LinearArgs &args) {
  return std::unique_ptr<Instruction>(new Quantize(args));
}

}  // namespace HR_LEVEL
}  // namespace hr
