// Weights in the order in which the kernels read them.
//
// A packed weight is a list of segments, runs of output columns that share a layout. A segment is cut
// into panels of 16 columns (the last padded with zeros); a panel is one stream, read front to back.
//
//   f32, f16, bf16   [K][16] values
//   quantized        one record per group of 32 values of K:
//                      n4: 256 bytes, 4 rows of 16 columns x 4 values; the low nibbles hold K values
//                          0..15 of the group, the high nibbles 16..31
//                      b8: 512 bytes, 8 rows of 16 columns x 4 signed values
//                    then 16 scales, or 2 x 16 where each half group has its own (`fine`), then as many
//                    minima where the format has them; float16 or float32.
//   A value is q * scale + minimum; nibbles without a minimum stand for q - 8.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "threads.h"

namespace hr {

constexpr int kColumns = 16;  // columns of a panel
constexpr int kGroup = 32;    // values of K that share an activation scale

enum class Layout { f32, f16, bf16, n4, b8 };

struct Scheme {
  Layout layout;
  bool half;     // scales and minima are float16, else float32
  bool minimum;  // has minima
  bool fine;     // scales per 16 values, else per 32
  bool quantized() const { return layout == Layout::n4 || layout == Layout::b8; }
  int scale_bytes() const { return kColumns * (half ? 2 : 4) * (fine ? 2 : 1); }
  int group_bytes() const {
    return (layout == Layout::n4 ? 256 : 512) + scale_bytes() * (minimum ? 2 : 1);
  }
  std::string name() const;
  bool operator==(const Scheme &o) const {
    return layout == o.layout && half == o.half && minimum == o.minimum && fine == o.fine;
  }
};

struct Segment {
  Scheme scheme;
  int32_t first, columns;  // output columns [first, first + columns)
  int32_t panels;
  size_t panel_bytes;
  size_t offset;  // from the start of the weight
};

// A tensor as it lies in the checkpoint: rows of `depth` values.
struct Source {
  std::string format;
  int32_t rows;
  const uint8_t *data;  // or null, for planning
  bool release;         // data is a file mapping whose pages may be dropped once packed
};

// Throws std::invalid_argument for a format that has no packing.
Scheme scheme_of(const std::string &format);

struct SourceFormat;

class Weight {
 public:
  // order: row i of the weight is row order[i] of the stacked sources; empty: as they are.
  Weight(std::vector<Source> sources, std::vector<int32_t> order, int32_t depth);

  // Writes the packed form to `data`, [bytes], 64-byte aligned, and keeps the address.
  void pack(uint8_t *data, Pool &pool);

  int32_t columns() const { return columns_; }
  int32_t depth() const { return depth_; }
  int32_t groups() const { return (depth_ + kGroup - 1) / kGroup; }
  size_t bytes() const { return bytes_; }
  bool quantized() const;
  bool fine() const;
  const uint8_t *data() const { return data_; }
  const std::vector<Segment> &segments() const { return segments_; }
  std::string layouts() const;

 private:
  // Where row i of the weight comes from.
  const uint8_t *row(int32_t i, const Source **source) const;
  // Rows and formats of a panel's columns; returns how many there are.
  int32_t panel_rows(const Segment &segment, int32_t panel, const uint8_t **rows,
                     const SourceFormat **formats) const;
  void pack_quantized(const Segment &segment, int32_t panel, uint8_t *out) const;
  void pack_floats(const Segment &segment, int32_t panel, uint8_t *out) const;
  std::vector<Source> sources_;
  std::vector<int32_t> starts_, order_;
  int32_t depth_, columns_ = 0;
  size_t bytes_ = 0;
  std::vector<Segment> segments_;
  const uint8_t *data_ = nullptr;
};

}  // namespace hr
