// Where K and V of a token lie (the layout is described at KVGeometry in runtime.h).
#pragma once
#include "runtime.h"
#include "simd.h"

namespace hr {
namespace HR_LEVEL {

constexpr int32_t kTile = 16;  // tokens in a K tile

HR_INLINE size_t kv_item(KVType type) {
  return type == KVType::f32 ? 4 : type == KVType::f16 ? 2 : 1;
}

// The pages of one (slot, table row): entry b holds positions [b * block_size, (b + 1) *
// block_size).
HR_INLINE const int32_t *page_table(const Batch &batch, int32_t slot, int32_t table_row) {
  const size_t row = static_cast<size_t>(slot) * batch.table_rows + table_row;
  return batch.table + row * batch.max_blocks;
}

// Values of one (layer in page, kv head) in a page: K from here, V at `value_offset`.
HR_INLINE uint8_t *head_at(const KVGeometry &kv, int32_t page, int32_t layer, int32_t head) {
  return kv.pages + page * kv.page_bytes + layer * kv.layer_bytes + head * kv.head_bytes;
}
HR_INLINE size_t value_offset(const KVGeometry &kv) {
  return kv_item(kv.type) * kv.block_size * kv.head_dim;
}
// int8: block_size scales of K, then as many of V.
HR_INLINE float *scales_at(const KVGeometry &kv, uint8_t *head) {
  return reinterpret_cast<float *>(head + 2 * value_offset(kv));
}

// The slice that a row belongs to.
HR_INLINE int32_t slice_of(const Step &step, int32_t row) {
  int32_t low = 0, high = step.slices;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (step.batch->slice_row[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace HR_LEVEL
}  // namespace hr
