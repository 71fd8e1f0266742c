// Weights in the order in which the kernels read them.
//
// A packed weight is a list of segments, runs of output columns that share a layout. A segment is cut
// into panels of 16 columns (the last padded with zeros); a panel is one stream, read front to back.
//
//   f32, f16, bf16   [K][16] values
//   quantized        one record per group of 32 values of K: the values, 64 bytes a bit, then 16 scales,
//                    or 2 x 16 where each half group has its own (`fine`), then as many minima where the
//                    format has them. They are float16, float32, or signed bytes (`coarse`); those are
//                    times the float16 scale and minimum of 8 groups, which lie before their records.
//                    With `zeroed` scales, float16, a minimum is a signed byte times the scale.
//                    K values 4 j to 4 j + 3 of 16 columns are 64 bytes, j in 0..7; where values have
//                    less than 8 bits these are spread over planes of such bytes, j in 0..3 with j + 4:
//                      4 bits   j in the low, j + 4 in the high nibble of byte row j      n4 n5 n6
//                      2 bits   byte row j / 2, bits 4 (j % 2) of j and 2 above of j + 4  n2 n3 n6
//                      1 bit    one byte row, bit 2 j of j and above it of j + 4          n3 n5
//                    where the planes of a layout follow in this order, and the first has the low bits.
//   A value is q * scale + minimum. Below 8 bits q is unsigned; without a minimum it stands for
//   q - 2^(bits - 1). In iq4 and fp4, laid out as n4, it stands for an entry of kCodes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "threads.h"

namespace hr {

constexpr int kColumns = 16;  // columns of a panel
constexpr int kGroup = 32;    // values of K that share an activation scale
constexpr int kGroupsAHeader = 8;  // groups that share the float16 factors of coarse scales

enum class Layout { f32, f16, bf16, n2, n3, n4, n5, n6, b8, iq4, fp4 };
enum class Scales { half, single, coarse, zeroed };

// The values of IQ4_NL and IQ4_XS, and those of MXFP4 doubled.
constexpr int8_t kCodes[2][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

struct Scheme {
  Layout layout;
  Scales scales;
  bool minimum;  // has minima
  bool fine;     // scales per 16 values, else per 32

  // Of a quantized value; 0 for floats.
  constexpr int bits() const {
    return layout == Layout::n2   ? 2
           : layout == Layout::n3 ? 3
           : layout == Layout::n4 ? 4
           : layout == Layout::n5 ? 5
           : layout == Layout::n6 ? 6
           : layout == Layout::b8 ? 8
           : coded()              ? 4
                                  : 0;
  }
  constexpr bool coded() const { return layout == Layout::iq4 || layout == Layout::fp4; }
  constexpr bool quantized() const { return bits() > 0; }
  // What is taken from a stored value.
  constexpr int offset() const {
    return bits() == 8 || minimum || coded() ? 0 : 1 << (bits() - 1);
  }
  // What coded values stand for, 16 entries, or null.
  constexpr const int8_t *codes() const {
    return layout == Layout::iq4 ? kCodes[0] : layout == Layout::fp4 ? kCodes[1] : nullptr;
  }
  constexpr size_t value_bytes() const { return static_cast<size_t>(kColumns * kGroup * bits() / 8); }
  // Bytes of a scale, and of a minimum.
  constexpr size_t scale_size() const {
    return scales == Scales::single ? 4 : scales == Scales::coarse ? 1 : 2;
  }
  constexpr size_t minimum_size() const {
    return !minimum ? 0 : scales == Scales::zeroed ? 1 : scale_size();
  }
  // Where the minima of a record begin; its scales follow its values.
  constexpr size_t minima_at() const { return value_bytes() + kColumns * scale_size() * halves(); }
  constexpr size_t halves() const { return fine ? 2 : 1; }
  constexpr size_t group_bytes() const { return minima_at() + kColumns * minimum_size() * halves(); }
  constexpr size_t header_bytes() const {
    return scales == Scales::coarse ? static_cast<size_t>(kColumns * 2 * (minimum ? 2 : 1)) : 0;
  }
  // Where the record of a group begins in its panel, and the header of its coarse scales.
  constexpr size_t record_at(int32_t group) const {
    return static_cast<size_t>(group) * group_bytes() +
           static_cast<size_t>(group / kGroupsAHeader + 1) * header_bytes();
  }
  constexpr size_t header_at(int32_t group) const {
    return static_cast<size_t>(group / kGroupsAHeader) *
           (kGroupsAHeader * group_bytes() + header_bytes());
  }
  constexpr size_t panel_bytes(int32_t groups) const {
    return static_cast<size_t>(groups) * group_bytes() +
           static_cast<size_t>((groups + kGroupsAHeader - 1) / kGroupsAHeader) * header_bytes();
  }
  std::string name() const;
  bool operator==(const Scheme &o) const {
    return layout == o.layout && scales == o.scales && minimum == o.minimum && fine == o.fine;
  }
};

struct Segment {
  Scheme scheme;
  int32_t first, columns;  // output columns [first, first + columns)
  int32_t panels;
  size_t panel_bytes;
  size_t offset;  // from the start of the weight
};

// One column of a packed group.
struct Column {
  int8_t value[kGroup];  // less the offset
  float scale[2], minimum[2];
};

// Reads column `column` of group `group` of a panel.
void unpack(const Scheme &scheme, const uint8_t *panel, int32_t group, int column, Column &out);

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
