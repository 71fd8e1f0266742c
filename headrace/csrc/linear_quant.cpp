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

namespace hr {
namespace HR_LEVEL {
namespace {

using namespace dot;

template <bool Half>
HR_INLINE Floats scales(const uint8_t *at, int index) {
  if (Half) return load_half(reinterpret_cast<const uint16_t *>(at) + 16 * index);
  return load(reinterpret_cast<const float *>(at) + 16 * index);
}

// A group's record as packed (pack.h).
template <Layout L, bool Half, bool HasMinimum, bool Fine>
struct Record {
  static constexpr bool narrow = L == Layout::n4;
  static constexpr bool minimum = HasMinimum || narrow;
  static constexpr bool fine = Fine;
  static constexpr size_t values = narrow ? 256 : 512;
  static constexpr size_t bytes = values + 16 * (Half ? 2 : 4) * (Fine ? 2 : 1) * (HasMinimum ? 2 : 1);
  using Sum = typename std::conditional<narrow, NarrowSum, WideSum>::type;

  // Values 4 j to 4 j + 3 of the group's first and second half.
  static HR_INLINE void quads(const uint8_t *record, int j, Bytes &first, Bytes &second) {
    if (narrow) {
      Bytes both = load_bytes(record + 64 * j);
      first = low_nibbles(both);
      second = high_nibbles(both);
    } else {
      first = load_bytes(record + 64 * j);
      second = load_bytes(record + 64 * (j + 4));
    }
  }
  static HR_INLINE Floats scale(const uint8_t *record, int half) {
    return scales<Half>(record + values, half);
  }
  static HR_INLINE Floats low(const uint8_t *record, int half) {
    if (HasMinimum) return scales<Half>(record + values, (Fine ? 2 : 1) + half);
    return mul(scale(record, half), broadcast(-8.0f));
  }
};

// A record opened for many rows: a byte a value, float32 scales and minima.
template <class R>
struct Opened {
  static constexpr bool minimum = R::minimum;
  static constexpr bool fine = R::fine;
  static constexpr size_t bytes = 512 + 64 * (fine ? 2 : 1) * (minimum ? 2 : 1);
  using Sum = typename R::Sum;

  static HR_INLINE void quads(const uint8_t *record, int j, Bytes &first, Bytes &second) {
    first = load_bytes(record + 64 * j);
    second = load_bytes(record + 64 * (j + 4));
  }
  static HR_INLINE Floats scale(const uint8_t *record, int half) {
    return scales<false>(record + 512, half);
  }
  static HR_INLINE Floats low(const uint8_t *record, int half) {
    return scales<false>(record + 512, (fine ? 2 : 1) + half);
  }

  static void open(const uint8_t *panel, int32_t groups, uint8_t *out) {
    for (int32_t g = 0; g < groups; ++g) {
      const uint8_t *record = panel + static_cast<size_t>(g) * R::bytes;
      uint8_t *to = out + static_cast<size_t>(g) * bytes;
      for (int j = 0; j < 4; ++j) {
        Bytes first, second;
        R::quads(record, j, first, second);
        std::memcpy(to + 64 * j, &first, 64);
        std::memcpy(to + 64 * (j + 4), &second, 64);
      }
      auto *floats = reinterpret_cast<float *>(to + 512);
      for (int half = 0; half < (fine ? 2 : 1); ++half) {
        store(floats + 16 * half, R::scale(record, half));
        if (minimum) store(floats + 16 * ((fine ? 2 : 1) + half), R::low(record, half));
      }
    }
  }
};

// Adds one group's share to R rows of y.
template <class G, int R>
HR_INLINE void add_group(const uint8_t *record, int32_t g, const uint8_t *rows,
                         const QuantizedRow &layout, Floats (&y)[R]) {
  constexpr int kHalves = G::fine ? 2 : 1;
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
      if (G::Sum::kSigned) {
        size_t at = whole_at + 4 * static_cast<size_t>(g * kHalves + h);
        std::memcpy(&whole, rows + static_cast<size_t>(r) * stride + at, 4);
      }
      sum[h][r].begin(whole);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    Bytes first, second;
    G::quads(record, j, first, second);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      sum[0][r].add(first, load_quad(x + static_cast<size_t>(r) * stride + 4 * j));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      sum[kHalves - 1][r].add(second, load_quad(x + static_cast<size_t>(r) * stride + 4 * j + 16));
  }
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    Floats scale = G::scale(record, h);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const uint8_t *row = rows + static_cast<size_t>(r) * stride;
      Floats factor = mul(scale, broadcast(reinterpret_cast<const float *>(row + layout.scale)[g]));
      y[r] = fma(to_float(sum[h][r].total()), factor, y[r]);
    }
    if (G::minimum) {
      Floats low = G::low(record, h);
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

// R rows of P panels, `apart` bytes from one another and read side by side: a core fetches two streams
// faster than one.
template <class G, int R, int P = 1>
void block(const Tile &tile, const uint8_t *panel, size_t apart, int32_t row, int32_t column,
           int32_t count) {
  const LinearArgs &args = *tile.args;
  const int32_t groups = args.weight->groups();
  const QuantizedRow layout(groups);
  const uint8_t *rows = args.quantized + static_cast<size_t>(row) * layout.bytes;
  Floats y[P][R];
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) y[p][r] = zero();
  for (int32_t g = 0; g < groups; ++g)
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p)
      add_group<G, R>(panel + static_cast<size_t>(p) * apart + static_cast<size_t>(g) * G::bytes, g,
                      rows, layout, y[p]);
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r)
      finish(args, y[p][r], row + r, column + p * kColumns, p + 1 < P ? kColumns : count);
}

// Most rows of a tile: what the registers hold.
#if defined(HR_LEVEL_AVX512)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
// From this many rows on a panel is opened once instead of at each tile.
constexpr int32_t kOpenRows = 6 * kRows;

template <class G>
void panel_rows(const Tile &tile, const uint8_t *panel, int32_t column, int32_t count) {
  constexpr int kMost = G::fine ? kRows / 2 : kRows;
  int32_t row = tile.first, end = tile.first + tile.rows;
  for (; end - row >= kMost; row += kMost) block<G, kMost>(tile, panel, 0, row, column, count);
  switch (end - row) {
    case 1: block<G, 1>(tile, panel, 0, row, column, count); break;
    case 2: block<G, 2>(tile, panel, 0, row, column, count); break;
    case 3: block<G, 3>(tile, panel, 0, row, column, count); break;
#if defined(HR_LEVEL_AVX512)
    case 4: block<G, 4>(tile, panel, 0, row, column, count); break;
    case 5: block<G, 5>(tile, panel, 0, row, column, count); break;
    case 6: block<G, 6>(tile, panel, 0, row, column, count); break;
    case 7: block<G, 7>(tile, panel, 0, row, column, count); break;
#endif
    default: break;
  }
}

template <Layout L, bool Half, bool HasMinimum, bool Fine>
void panels(const Tile &tile, uint8_t *scratch) {
  using Packed = Record<L, Half, HasMinimum, Fine>;
  const Segment &segment = *tile.segment;
  const uint8_t *data = tile.args->weight->data() + segment.offset;
  for (int32_t p = tile.panel; p < tile.panel + tile.panels; ++p) {
    const uint8_t *panel = data + static_cast<size_t>(p) * segment.panel_bytes;
    int32_t column = segment.first + p * kColumns;
    int32_t count = segment.columns - p * kColumns;
    if (count > kColumns) count = kColumns;
    if (tile.rows == 1 && p + 1 < tile.panel + tile.panels) {
      count = std::min(segment.columns - ++p * kColumns, kColumns);
      block<Packed, 1, 2>(tile, panel, segment.panel_bytes, tile.first, column, count);
    } else if (tile.rows >= kOpenRows) {
      Opened<Packed>::open(panel, tile.args->weight->groups(), scratch);
      panel_rows<Opened<Packed>>(tile, scratch, column, count);
    } else {
      panel_rows<Packed>(tile, panel, column, count);
    }
  }
}

}  // namespace

size_t opened_bytes(int32_t groups) { return static_cast<size_t>(groups) * (512 + 4 * 64); }

void run_quantized(const Tile &tile, uint8_t *scratch) {
  const Scheme &s = tile.segment->scheme;
  if (s.layout == Layout::n4) {
    if (s.half) return s.minimum ? panels<Layout::n4, true, true, false>(tile, scratch)
                                 : panels<Layout::n4, true, false, false>(tile, scratch);
    if (!s.fine) return panels<Layout::n4, false, true, false>(tile, scratch);
    return s.minimum ? panels<Layout::n4, false, true, true>(tile, scratch)
                     : panels<Layout::n4, false, false, true>(tile, scratch);
  }
  if (s.fine) return panels<Layout::b8, false, false, true>(tile, scratch);
  if (s.half) return s.minimum ? panels<Layout::b8, true, true, false>(tile, scratch)
                               : panels<Layout::b8, true, false, false>(tile, scratch);
  return s.minimum ? panels<Layout::b8, false, true, false>(tile, scratch)
                   : panels<Layout::b8, false, false, false>(tile, scratch);
}

}  // namespace HR_LEVEL
}  // namespace hr
