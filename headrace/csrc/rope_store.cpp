// RopeStore of spec.py: q/k norm, rotation, K and V to the pages, q to its buffer.
#include <cmath>

#include "pages.h"
#include "rows.h"

namespace hr {
namespace HR_LEVEL {
namespace {

// Turns pairs (x[i], x[i + half]) for i < half.
HR_INLINE void rotate_halves(float *x, const float *cos, const float *sin, int32_t half) {
  int32_t i = 0;
  for (; i + W <= half; i += W) {
    const F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// Turns pairs (x[2i], x[2i + 1]) for i < half.
HR_INLINE void rotate_pairs(float *x, const float *cos, const float *sin, int32_t half) {
  int32_t i = 0;
  for (; 2 * i + W <= 2 * half; i += W / 2) {
    const F v = load(x + 2 * i);
    store(x + 2 * i, v * load_twice(cos + i) + swap_pairs(v) * negate_even(load_twice(sin + i)));
  }
  for (; i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

HR_INLINE float largest(const float *x, int32_t count) {
  F top = zero();
  int32_t i = 0;
  for (; i + W <= count; i += W) top = max(top, abs(load(x + i)));
  float out = reduce_max(top);
  for (; i < count; i++) out = std::fabs(x[i]) > out ? std::fabs(x[i]) : out;
  return out;
}

// Rounds to int8 with one scale for the row; returns the scale.
float quantize(const float *x, int8_t *out, int32_t count) {
  const float scale = largest(x, count) / 127.0f;
  const F divisor = set(scale == 0 ? 1.0f : scale);
  alignas(64) int32_t whole[W];
  for (int32_t i = 0; i < count; i += W) {
    const int32_t here = lesser(W, count - i);
    const F v = here == W ? load(x + i) : load_part(x + i, here);
    store(whole, to_int(v / divisor));
    for (int32_t k = 0; k < here; k++) out[i + k] = static_cast<int8_t>(whole[k]);
  }
  return scale;
}

void to_halves(const float *x, uint16_t *out, int32_t count) {
  int32_t i = 0;
  for (; i + W <= count; i += W) store_f16(out + i, load(x + i));
  if (i == count) return;
  uint16_t rest[W];
  store_f16(rest, load_part(x + i, count - i));
  std::memcpy(out + i, rest, sizeof(uint16_t) * (count - i));
}

template <class T>
HR_INLINE void scatter(const T *values, T *tile, int32_t lane, int32_t dim) {
  for (int32_t d = 0; d < dim; d++) tile[d * kTile + lane] = values[d];
}

class RopeStore final : public Instruction {
 public:
  explicit RopeStore(const RopeStoreArgs &args) : a_(args) {
    op = "rope_store";
    path = HR_LEVEL_NAME;
    width_ = (a_.heads + 2 * a_.kv.kv_heads) * a_.kv.head_dim;
    rows_ = greater(1, 16384 / width_);
  }

  int32_t pieces(const Step &step) const override { return ceil_div(step.tokens, rows_); }
  // A k row, one head of K or V in the storage type, and the turns of a position.
  size_t scratch_bytes() const override {
    return sizeof(float) * (a_.kv.kv_heads + 2) * (a_.kv.head_dim + W);
  }

  void run(const Step &step, int32_t piece, Scratch &scratch) const override {
    const Batch &batch = *step.batch;
    const int32_t end = lesser(step.tokens, (piece + 1) * rows_);
    int32_t slice = slice_of(step, piece * rows_);
    float *k = reinterpret_cast<float *>(scratch.data);
    for (int32_t row = piece * rows_; row < end; row++) {
      while (batch.slice_row[slice + 1] <= row) slice++;
      const int32_t position = batch.position[row];
      const int32_t page = page_table(batch, batch.slice_slot[slice],
                                      a_.table_row)[position / a_.kv.block_size];
      const float *qkv = a_.qkv + static_cast<size_t>(row) * width_;
      const int32_t q_width = a_.heads * a_.kv.head_dim, k_width = a_.kv.kv_heads * a_.kv.head_dim;
      float *spare = k + k_width;
      if (a_.near)
        turn(qkv, a_.near + static_cast<size_t>(row) * q_width, a_.heads, a_.q_norm,
             turns(lesser(position, a_.near_position), spare));
      const Turns here = turns(position, spare);
      turn(qkv, a_.out + static_cast<size_t>(row) * q_width, a_.heads, a_.q_norm, here);
      turn(qkv + q_width, k, a_.kv.kv_heads, a_.k_norm, here);
      put(k, qkv + q_width + k_width, page, position % a_.kv.block_size, spare);
    }
  }

  double bytes(const Step &step) const override {
    return static_cast<double>(step.tokens) * a_.kv.head_dim *
           (4 * (2 * a_.heads + 2 * a_.kv.kv_heads) + 2 * kv_item(a_.kv.type) * a_.kv.kv_heads);
  }

 private:
  // Cosines and sines of one position, [rotary / 2] each.
  struct Turns {
    const float *cos, *sin;
  };

  // Where the tables are split, the turns are made in `room`, [rotary] values.
  Turns turns(int32_t position, float *room) const {
    const int32_t half = a_.rotary / 2;
    if (!a_.cos || a_.low_rows == 0)
      return {a_.cos + static_cast<size_t>(position) * half,
              a_.sin + static_cast<size_t>(position) * half};
    const size_t low = static_cast<size_t>(position % a_.low_rows) * half;
    const size_t high = static_cast<size_t>(a_.low_rows + position / a_.low_rows) * half;
    float *cos = room, *sin = room + half;
    for (int32_t i = 0; i < half; i++) {
      const float a = a_.cos[low + i], b = a_.sin[low + i];
      const float c = a_.cos[high + i], d = a_.sin[high + i];
      cos[i] = a * c - b * d;
      sin[i] = b * c + a * d;
    }
    return {cos, sin};
  }

  // Norm and rotation of the heads of one row of q or k.
  void turn(const float *x, float *out, int32_t heads, const float *weight, Turns by) const {
    const int32_t dim = a_.kv.head_dim;
    if (!weight) {
      std::memcpy(out, x, sizeof(float) * heads * dim);
    } else if (a_.norm_row) {
      normalise(x, out, heads * dim, weight);
    } else {
      for (int32_t head = 0; head < heads; head++)
        normalise(x + head * dim, out + head * dim, dim, weight);
    }
    if (!a_.cos) return;
    const int32_t half = a_.rotary / 2;
    for (int32_t head = 0; head < heads; head++) {
      if (a_.pairs) {
        rotate_pairs(out + head * dim, by.cos, by.sin, half);
      } else {
        rotate_halves(out + head * dim, by.cos, by.sin, half);
      }
    }
  }

  void normalise(const float *x, float *out, int32_t width, const float *weight) const {
    const float mean_square = sum_squares(x, width, 0.0f) / static_cast<float>(width);
    scale_row(x, out, width, 0.0f, 1.0f / std::sqrt(mean_square + a_.eps), weight, nullptr);
  }

  // Writes k and v [kv_heads, head_dim] of one token. spare: head_dim values of room.
  void put(const float *k, const float *v, int32_t page, int32_t token, float *spare) const {
    const KVGeometry &kv = a_.kv;
    const int32_t dim = kv.head_dim, lane = token % kTile;
    const size_t tile = static_cast<size_t>(token / kTile) * dim * kTile;
    const size_t value_row = static_cast<size_t>(token) * dim;
    for (int32_t head = 0; head < kv.kv_heads; head++, k += dim, v += dim) {
      uint8_t *to = head_at(kv, page, a_.layer_in_page, head);
      uint8_t *values = to + value_offset(kv);
      if (kv.type == KVType::f32) {
        scatter(k, reinterpret_cast<float *>(to) + tile, lane, dim);
        std::memcpy(reinterpret_cast<float *>(values) + value_row, v, sizeof(float) * dim);
      } else if (kv.type == KVType::f16) {
        uint16_t *halves = reinterpret_cast<uint16_t *>(spare);
        to_halves(k, halves, dim);
        scatter(halves, reinterpret_cast<uint16_t *>(to) + tile, lane, dim);
        to_halves(v, reinterpret_cast<uint16_t *>(values) + value_row, dim);
      } else {
        int8_t *bytes = reinterpret_cast<int8_t *>(spare);
        float *scales = scales_at(kv, to);
        scales[token] = quantize(k, bytes, dim);
        scatter(bytes, reinterpret_cast<int8_t *>(to) + tile, lane, dim);
        scales[kv.block_size + token] =
            quantize(v, reinterpret_cast<int8_t *>(values) + value_row, dim);
      }
    }
  }

  RopeStoreArgs a_;
  int32_t width_, rows_;
};

}  // namespace

std::unique_ptr<Instruction> make_rope_store(const RopeStoreArgs &args) {
  return std::unique_ptr<Instruction>(new RopeStore(args));
}

}  // namespace HR_LEVEL
}  // namespace hr
