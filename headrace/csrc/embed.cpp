// Rows of the embedding table, read out of the packed weight that the logits share.
#include <cstring>

#include "dot.h"
#include "linear.h"

namespace hr {
namespace HR_LEVEL {
namespace {

// Calls put(k, value) for the values of one packed column, in order.
template <class Put>
void read_quantized(const Segment &segment, const uint8_t *panel, int column, int32_t groups, Put put) {
  Column group;
  for (int32_t g = 0; g < groups; ++g) {
    unpack(segment.scheme, panel, g, column, group);
    for (int k = 0; k < kGroup; ++k)
      put(g * kGroup + k,
          static_cast<float>(group.value[k]) * group.scale[k / 16] + group.minimum[k / 16]);
  }
}

template <class Put>
void read_column(const Weight &weight, int32_t index, Put put) {
  for (const Segment &segment : weight.segments()) {
    int32_t at = index - segment.first;
    if (at < 0 || at >= segment.columns) continue;
    const uint8_t *panel =
        weight.data() + segment.offset + static_cast<size_t>(at / kColumns) * segment.panel_bytes;
    int column = at % kColumns;
    if (segment.scheme.quantized())
      return read_quantized(segment, panel, column, weight.groups(), [&](int32_t k, float value) {
        if (k < weight.depth()) put(k, value);
      });
    for (int32_t k = 0; k < weight.depth(); ++k) {
      size_t slot = static_cast<size_t>(k) * kColumns;
      float values[kColumns];
      if (segment.scheme.layout == Layout::f32) {
        std::memcpy(values, panel + slot * 4, sizeof values);
      } else {
        const auto *raw = reinterpret_cast<const uint16_t *>(panel) + slot;
        dot::store(values, segment.scheme.layout == Layout::f16 ? dot::load_half(raw)
                                                                : dot::load_brain(raw));
      }
      put(k, values[column]);
    }
    return;
  }
}

class Embed final : public Instruction {
 public:
  explicit Embed(const EmbedArgs &args) : a_(args) {
    op = "embed";
    path = std::string(HR_LEVEL_NAME) + " " + a_.table->layouts();
  }

  int32_t pieces(const Step &step) const override { return (step.tokens + kRows - 1) / kRows; }

  void run(const Step &step, int32_t piece, Scratch &) const override {
    int32_t end = piece * kRows + kRows;
    if (end > step.tokens) end = step.tokens;
    for (int32_t row = piece * kRows; row < end; ++row) {
      float *out = a_.out + static_cast<size_t>(row) * static_cast<size_t>(a_.table->depth());
      read_column(*a_.table, step.batch->token[row],
                  [&](int32_t k, float value) { out[k] = value * a_.scale; });
      if (a_.positions)
        read_column(*a_.positions, step.batch->position[row],
                    [&](int32_t k, float value) { out[k] += value; });
    }
  }

  double bytes(const Step &step) const override {
    double row = static_cast<double>(a_.table->bytes()) / a_.table->columns();
    return step.tokens * (row + 4.0 * a_.table->depth());
  }
  double flops(const Step &step) const override { return 2.0 * step.tokens * a_.table->depth(); }

 private:
  static constexpr int32_t kRows = 4;
  EmbedArgs a_;
};

}  // namespace

std::unique_ptr<Instruction> make_embed(const EmbedArgs &args) {
  return std::unique_ptr<Instruction>(new Embed(args));
}

}  // namespace HR_LEVEL
}  // namespace hr
