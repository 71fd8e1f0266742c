// Rows of the embedding table, read out of the packed weight that the logits share.
#include <cstring>

#include "dot.h"
#include "linear.h"

namespace hr {
namespace HR_LEVEL {
namespace {

float half_value(const uint8_t *at) {
  uint16_t bits[16] = {};
  std::memcpy(bits, at, 2);
  float values[16];
  dot::store(values, dot::load_half(bits));
  return values[0];
}

float scale_value(const Scheme &scheme, const uint8_t *scales, int index, int column) {
  size_t slot = static_cast<size_t>(index * kColumns + column);
  if (scheme.half) return half_value(scales + slot * 2);
  float value;
  std::memcpy(&value, scales + slot * 4, 4);
  return value;
}

// Calls put(k, value) for the values of one packed column, in order.
template <class Put>
void read_quantized(const Segment &segment, const uint8_t *panel, int column, int32_t groups, Put put) {
  const Scheme &scheme = segment.scheme;
  const bool nibbles = scheme.layout == Layout::n4;
  const int halves = scheme.fine ? 2 : 1;
  for (int32_t g = 0; g < groups; ++g) {
    const uint8_t *record = panel + static_cast<size_t>(g) * static_cast<size_t>(scheme.group_bytes());
    const uint8_t *scales = record + (nibbles ? 256 : 512);
    for (int h = 0; h < 2; ++h) {
      int index = scheme.fine ? h : 0;
      float scale = scale_value(scheme, scales, index, column);
      float minimum = scheme.minimum ? scale_value(scheme, scales, halves + index, column) : 0.0f;
      for (int k = 0; k < 16; ++k) {
        int quad = k / 4 + (nibbles ? 0 : 4 * h);
        uint8_t byte = record[quad * 64 + column * 4 + k % 4];
        int value = nibbles ? (h ? byte >> 4 : byte & 15) : static_cast<int8_t>(byte);
        if (nibbles && !scheme.minimum) value -= 8;
        put(g * kGroup + h * 16 + k, static_cast<float>(value) * scale + minimum);
      }
    }
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
