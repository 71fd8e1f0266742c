// Weights in float32, float16 and bfloat16: y = sum over k, in order, of weight * x, in float32.
#include <cstring>

#include "dot.h"
#include "linear_kernels.h"

namespace hr {
namespace HR_LEVEL {
namespace {

using namespace dot;

template <Layout L>
struct Item {
  static constexpr size_t bytes = L == Layout::f32 ? 4 : 2;
  static HR_INLINE Floats load16(const uint8_t *at) {
    if (L == Layout::f32) return load(reinterpret_cast<const float *>(at));
    if (L == Layout::f16) return load_half(reinterpret_cast<const uint16_t *>(at));
    return load_brain(reinterpret_cast<const uint16_t *>(at));
  }
};

const float *row_of(const Tile &tile, int32_t row) {
  int32_t from = tile.gather ? tile.gather[row] : row;
  return tile.args->x + static_cast<size_t>(from) * static_cast<size_t>(tile.args->weight->depth());
}

void finish(const LinearArgs &args, Floats y, int32_t row, int32_t column, int32_t count) {
  float values[kColumns];
  store(values, y);
  float *out = args.out + static_cast<size_t>(row) * static_cast<size_t>(args.weight->columns()) + column;
  for (int32_t c = 0; c < count; ++c) {
    float value = args.bias ? values[c] + args.bias[column + c] : values[c];
    out[c] = value * args.scale;
  }
}

// R rows times P panels; several panels keep the adders busy where rows are few.
template <Layout L, int R, int P>
void block(const Tile &tile, int32_t panel, int32_t row) {
  const Segment &segment = *tile.segment;
  const uint8_t *at[P];
  const float *x[R];
  Floats y[R][P];
  for (int p = 0; p < P; ++p)
    at[p] = tile.args->weight->data() + segment.offset +
            static_cast<size_t>(panel + p) * segment.panel_bytes;
  for (int r = 0; r < R; ++r) x[r] = row_of(tile, row + r);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) y[r][p] = zero();
  const int32_t depth = tile.args->weight->depth();
  for (int32_t k = 0; k < depth; ++k) {
    Floats w[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) w[p] = Item<L>::load16(at[p] + static_cast<size_t>(k) * 16 * Item<L>::bytes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Floats value = broadcast(x[r][k]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) y[r][p] = fma(w[p], value, y[r][p]);
    }
  }
  for (int p = 0; p < P; ++p) {
    int32_t column = (panel + p) * kColumns;
    int32_t count = segment.columns - column < kColumns ? segment.columns - column : kColumns;
    for (int r = 0; r < R; ++r)
      finish(*tile.args, y[r][p], row + r, segment.first + column, count);
  }
}

#if defined(HR_LEVEL_AVX512)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

template <Layout L>
void panels(const Tile &tile) {
  int32_t end = tile.panel + tile.panels, last = tile.first + tile.rows;
  int32_t panel = tile.panel;
  if (tile.rows == 1)
    for (; panel + 4 <= end; panel += 4) block<L, 1, 4>(tile, panel, tile.first);
  for (; panel < end; ++panel) {
    int32_t row = tile.first;
    for (; row + kRows <= last; row += kRows) block<L, kRows, 1>(tile, panel, row);
    for (; row + 3 <= last; row += 3) block<L, 3, 1>(tile, panel, row);
    for (; row < last; ++row) block<L, 1, 1>(tile, panel, row);
  }
}

}  // namespace

void run_float(const Tile &tile) {
  switch (tile.segment->scheme.layout) {
    case Layout::f32: return panels<Layout::f32>(tile);
    case Layout::f16: return panels<Layout::f16>(tile);
    default: return panels<Layout::bf16>(tile);
  }
}

}  // namespace HR_LEVEL
}  // namespace hr
