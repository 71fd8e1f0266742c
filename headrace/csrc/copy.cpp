// Copies of tokens from one page to another (partial reuse of a prefix, forks), in every layer.
#include "pages.h"

namespace hr {
namespace HR_LEVEL {
namespace {

// One piece a step: the copies are made in order, since one may read what another wrote, and they
// are few and short.
class Copy final : public Instruction {
 public:
  explicit Copy(const CopyArgs &args) : a_(args) {
    op = "copy";
    path = "copy";
  }

  int32_t pieces(const Step &step) const override { return step.copies > 0 ? 1 : 0; }

  void run(const Step &step, int32_t, Scratch &) const override {
    for (int32_t i = 0; i < step.copies; i++) {
      const int32_t *c = step.batch->copy + 4 * i;
      for (int32_t layer = 0; layer < a_.layers_per_page; layer++)
        for (int32_t head = 0; head < a_.kv.kv_heads; head++)
          copy(head_at(a_.kv, c[0], layer, head), head_at(a_.kv, c[1], layer, head), c[2], c[3]);
    }
  }

 private:
  void copy(uint8_t *from, uint8_t *to, int32_t first, int32_t tokens) const {
    const KVGeometry &kv = a_.kv;
    const size_t item = kv_item(kv.type), dim = kv.head_dim;
    for (int32_t token = first; token < first + tokens;) {
      const int32_t lane = token % kTile;
      const int32_t rest = first + tokens - token;
      const int32_t count = kTile - lane < rest ? kTile - lane : rest;
      for (size_t d = 0; d < dim; d++) {
        const size_t at = ((token / kTile * dim + d) * kTile + lane) * item;
        std::memcpy(to + at, from + at, count * item);
      }
      token += count;
    }
    const size_t values = value_offset(kv) + first * dim * item;
    std::memcpy(to + values, from + values, tokens * dim * item);
    if (kv.type != KVType::int8) return;
    for (int32_t side = 0; side < 2; side++) {
      const size_t at = static_cast<size_t>(side) * kv.block_size + first;
      std::memcpy(scales_at(kv, to) + at, scales_at(kv, from) + at, sizeof(float) * tokens);
    }
  }

  CopyArgs a_;
};

}  // namespace

std::unique_ptr<Instruction> make_copy(const CopyArgs &args) {
  return std::unique_ptr<Instruction>(new Copy(args));
}

}  // namespace HR_LEVEL
}  // namespace hr
