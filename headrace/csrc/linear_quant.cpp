// Quantized weights times quantized activations.
//
//   y[row, column] = sum over groups, in order, of  dot * (scale * activation scale)
//                                                 + minimum * (sum of the activations)
//
// The dot product of a group is exact in integers, so it may be taken in any way; the float operations
// of one (row, column) and their order are the same whatever the number of rows and the tile.
#include <algorithm>
#include <cstring>

#include "dot.h"
#include "linear_kernels.h"
#include "record.h"

namespace hr {
namespace HR_LEVEL {
namespace {

using namespace dot;

// Adds the products of values 4 J to 4 J + 3 of both halves of a group.
template <class G, int R, int J>
HR_INLINE void add_quads(const G &group, const int8_t *x, size_t stride,
                         typename G::Sum (&sum)[G::halves][R]) {
  Bytes first, second;
  group.template quads<J>(first, second);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    sum[0][r].add(first, load_quad(x + static_cast<size_t>(r) * stride + 4 * J));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    sum[G::halves - 1][r].add(second, load_quad(x + static_cast<size_t>(r) * stride + 4 * J + 16));
}

// Adds one group's share to R rows of y.
template <class G, int R>
HR_INLINE void add_group(const G group, int32_t g, const uint8_t *rows, const QuantizedRow &layout,
                         Floats (&y)[R]) {
  constexpr int kHalves = G::halves;
  const size_t stride = layout.bytes;
  const size_t sum_at = G::fine ? layout.half_sum : layout.sum;
  const size_t whole_at = G::fine ? layout.half_whole : layout.whole;
  const auto *x = reinterpret_cast<const int8_t *>(rows) + g * kGroup;
  typename G::Sum sum[kHalves][R];
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t whole = 0;
      if (G::Sum::kWhole) {
        size_t at = whole_at + 4 * static_cast<size_t>(g * kHalves + h);
        std::memcpy(&whole, rows + static_cast<size_t>(r) * stride + at, 4);
      }
      sum[h][r].begin(whole);
    }
  add_quads<G, R, 0>(group, x, stride, sum);
  add_quads<G, R, 1>(group, x, stride, sum);
  add_quads<G, R, 2>(group, x, stride, sum);
  add_quads<G, R, 3>(group, x, stride, sum);
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    Floats scale = group.scale(h);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const uint8_t *row = rows + static_cast<size_t>(r) * stride;
      Floats factor = mul(scale, broadcast(reinterpret_cast<const float *>(row + layout.scale)[g]));
      y[r] = fma(to_float(sum[h][r].total()), factor, y[r]);
    }
    if (G::minimum) {
      Floats low = group.low(h);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const uint8_t *row = rows + static_cast<size_t>(r) * stride;
        float total = reinterpret_cast<const float *>(row + sum_at)[g * kHalves + h];
        y[r] = fma(low, broadcast(total), y[r]);
      }
    }
  }
}

// Adds the bias, scales, and writes the columns that exist.
void finish(const LinearArgs &args, Floats y, int32_t row, int32_t column, int32_t count) {
  float *out = args.out + static_cast<size_t>(row) * static_cast<size_t>(args.weight->columns()) + column;
  float part[kColumns];
  if (args.bias) {
    const float *bias = args.bias + column;
    if (count < kColumns) {
      std::memset(part, 0, sizeof part);
      std::memcpy(part, bias, static_cast<size_t>(count) * 4);
      bias = part;
    }
    y = add(y, load(bias));
  }
  if (args.scale != 1.0f) y = mul(y, broadcast(args.scale));
  if (count == kColumns) {
    store(out, y);
  } else {
    store(part, y);
    std::memcpy(out, part, static_cast<size_t>(count) * 4);
  }
}

// Asks for `bytes` from `from` on.
template <size_t bytes>
HR_INLINE void fetch(const uint8_t *from) {
#pragma GCC unroll 16
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// R rows of a panel. With each group it asks for the next F bytes from `ahead` on.
template <class G, int R, size_t F = 0>
void block(const Tile &tile, const uint8_t *panel, const uint8_t *ahead, int32_t row, int32_t column,
           int32_t count) {
  const LinearArgs &args = *tile.args;
  const int32_t groups = args.weight->groups();
  const QuantizedRow layout(groups);
  const uint8_t *rows = args.quantized + static_cast<size_t>(row) * layout.bytes;
  Floats y[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) y[r] = zero();
  for (int32_t g = 0; g < groups; ++g) {
    if (F > 0) fetch<F>(ahead + F * static_cast<size_t>(g));
    add_group<G, R>(G::at(panel, g), g, rows, layout, y);
  }
  for (int r = 0; r < R; ++r) finish(args, y[r], row + r, column, count);
}

// Most rows of a tile: what the registers hold.
#if defined(HR_LEVEL_AVX512)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
// From this many rows on a panel is opened once instead of at each tile. Opened panels crowd the caches,
// so where unpacking is two instructions it takes more rows to pay.
template <class Packed>
constexpr int32_t open_rows() {
  constexpr Scheme s = Packed::scheme;
  bool plain = (s.layout == Layout::n4 || s.layout == Layout::b8) && s.scales != Scales::coarse;
  return (plain ? 16 : 6) * kRows;
}

// How far ahead of its reading one row, or the first tile of several, asks for packed weights: by itself
// a core has too few reads in flight. Measured on Zen 3 (docs/performance.md).
constexpr size_t kAheadOne = 1280, kAhead = 2560;

// The rows of the tile that are left from `row` on, fewer than a whole block's.
template <class G, size_t F>
void last_rows(const Tile &tile, const uint8_t *panel, const uint8_t *ahead, int32_t row,
               int32_t column, int32_t count) {
  switch (tile.first + tile.rows - row) {
    case 1: block<G, 1, F>(tile, panel, ahead, row, column, count); break;
    case 2: block<G, 2, F>(tile, panel, ahead, row, column, count); break;
    case 3: block<G, 3, F>(tile, panel, ahead, row, column, count); break;
#if defined(HR_LEVEL_AVX512)
    case 4: block<G, 4, F>(tile, panel, ahead, row, column, count); break;
    case 5: block<G, 5, F>(tile, panel, ahead, row, column, count); break;
    case 6: block<G, 6, F>(tile, panel, ahead, row, column, count); break;
    case 7: block<G, 7, F>(tile, panel, ahead, row, column, count); break;
#endif
    default: break;
  }
}

// All rows of the tile; the first block asks for the weights from `ahead` on, F bytes a group.
template <class G, size_t F>
void panel_rows(const Tile &tile, const uint8_t *panel, const uint8_t *ahead, int32_t column,
                int32_t count) {
  constexpr int kMost = G::fine ? kRows / 2 : kRows;
  if (tile.rows < kMost) return last_rows<G, F>(tile, panel, ahead, tile.first, column, count);
  block<G, kMost, F>(tile, panel, ahead, tile.first, column, count);
  int32_t row = tile.first + kMost, end = tile.first + tile.rows;
  for (; end - row >= kMost; row += kMost) block<G, kMost>(tile, panel, nullptr, row, column, count);
  last_rows<G, 0>(tile, panel, nullptr, row, column, count);
}

template <class Packed>
void panels(const Tile &tile, uint8_t *scratch) {
  constexpr size_t kBytes = Packed::scheme.group_bytes();
  const Segment &segment = *tile.segment;
  const uint8_t *data = tile.args->weight->data() + segment.offset;
  const int32_t groups = tile.args->weight->groups();
  for (int32_t p = tile.panel; p < tile.panel + tile.panels; ++p) {
    const uint8_t *panel = data + static_cast<size_t>(p) * segment.panel_bytes;
    const int32_t column = segment.first + p * kColumns;
    const int32_t count = std::min(segment.columns - p * kColumns, kColumns);
    if (tile.rows >= open_rows<Packed>()) {
      open_panel<Packed>(panel, groups, scratch);
      panel_rows<OpenedOf<Packed>, kBytes>(tile, scratch, panel + segment.panel_bytes, column, count);
    } else {
      const uint8_t *ahead = panel + (tile.rows == 1 ? kAheadOne : kAhead);
      panel_rows<Packed, kBytes>(tile, panel, ahead, column, count);
    }
  }
}

struct Kernel {
  Scheme scheme;
  void (*run)(const Tile &, uint8_t *);
};
template <Layout L, Scales S, bool HasMinimum, bool Fine>
constexpr Kernel kernel() {
  return {{L, S, HasMinimum, Fine}, panels<Record<L, S, HasMinimum, Fine>>};
}

// The schemes of decode.cpp.
constexpr Kernel kKernels[] = {
    kernel<Layout::n4, Scales::half, true, false>(),
    kernel<Layout::n4, Scales::half, false, false>(),
    kernel<Layout::n4, Scales::coarse, true, false>(),
    kernel<Layout::n4, Scales::single, true, false>(),
    kernel<Layout::n4, Scales::zeroed, true, false>(),
    kernel<Layout::b8, Scales::half, false, false>(),
    kernel<Layout::b8, Scales::single, false, false>(),
    kernel<Layout::b8, Scales::single, true, false>(),
    kernel<Layout::n6, Scales::coarse, false, true>(),
    kernel<Layout::n5, Scales::coarse, true, false>(),
    kernel<Layout::n5, Scales::half, true, false>(),
    kernel<Layout::n5, Scales::half, false, false>(),
    kernel<Layout::n3, Scales::coarse, false, true>(),
    kernel<Layout::n2, Scales::coarse, true, true>(),
    kernel<Layout::iq4, Scales::half, false, false>(),
    kernel<Layout::iq4, Scales::coarse, false, false>(),
    kernel<Layout::fp4, Scales::single, false, false>(),
};

}  // namespace

size_t opened_bytes(int32_t groups) { return static_cast<size_t>(groups) * (512 + 4 * 64); }

void run_quantized(const Tile &tile, uint8_t *scratch) {
  for (const Kernel &kernel : kKernels)
    if (kernel.scheme == tile.segment->scheme) return kernel.run(tile, scratch);
}

}  // namespace HR_LEVEL
}  // namespace hr
