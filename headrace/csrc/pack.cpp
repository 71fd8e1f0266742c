#include "pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "decode.h"
#include "memory.h"

namespace hr {

std::string Scheme::name() const {
  switch (layout) {
    case Layout::f32: return "f32";
    case Layout::f16: return "f16";
    case Layout::bf16: return "bf16";
    default: break;
  }
  std::string text = layout == Layout::iq4   ? "iq4"
                     : layout == Layout::fp4 ? "fp4"
                                             : (bits() == 8 ? "b" : "n") + std::to_string(bits());
  text += fine ? "g16" : "g32";
  text += scales == Scales::single ? "-f32" : scales == Scales::coarse ? "-i8" : "-f16";
  return !minimum ? text : scales == Scales::zeroed ? text + "-zero" : text + "-min";
}

Scheme scheme_of(const std::string &format) { return find_format(format).scheme; }

Weight::Weight(std::vector<Source> sources, std::vector<int32_t> order, int32_t depth)
    : sources_(std::move(sources)), order_(std::move(order)), depth_(depth) {
  for (const Source &source : sources_) {
    if (depth % find_format(source.format).values != 0)
      throw std::invalid_argument("rows of " + std::to_string(depth) + " values do not hold whole " +
                                  source.format + " blocks");
    starts_.push_back(columns_);
    columns_ += source.rows;
  }
  if (!order_.empty() && static_cast<int32_t>(order_.size()) != columns_)
    throw std::invalid_argument("row_order must name each row once");
  for (int32_t from : order_)
    if (from < 0 || from >= columns_) throw std::invalid_argument("row_order is out of range");
  for (int32_t i = 0; i < columns_; ++i) {
    const Source *source;
    row(i, &source);
    Scheme scheme = scheme_of(source->format);
    if (segments_.empty() || !(segments_.back().scheme == scheme))
      segments_.push_back({scheme, i, 0, 0, 0, 0});
    ++segments_.back().columns;
  }
  for (Segment &segment : segments_) {
    segment.panels = (segment.columns + kColumns - 1) / kColumns;
    size_t depth = static_cast<size_t>(depth_);
    segment.panel_bytes = segment.scheme.quantized()
                              ? segment.scheme.panel_bytes(this->groups())
                              : depth * kColumns * (segment.scheme.layout == Layout::f32 ? 4 : 2);
    segment.offset = bytes_;
    bytes_ += round_up(segment.panel_bytes * static_cast<size_t>(segment.panels), 64);
  }
}

const uint8_t *Weight::row(int32_t i, const Source **source) const {
  int32_t from = order_.empty() ? i : order_[static_cast<size_t>(i)];
  auto after = std::upper_bound(starts_.begin(), starts_.end(), from);
  size_t part = static_cast<size_t>(after - starts_.begin()) - 1;
  *source = &sources_[part];
  if (!sources_[part].data) return nullptr;
  size_t row_bytes = find_format(sources_[part].format).row_bytes(depth_);
  return sources_[part].data + row_bytes * static_cast<size_t>(from - starts_[part]);
}

namespace {

// Scales and minima of one column, and what coarse ones are times.
void put_scales(uint8_t *record, uint8_t *header, const Scheme &scheme, int column,
                const Block &block) {
  const size_t place = static_cast<size_t>(column);
  const auto put = [&](size_t at, size_t size, const void *from) {
    for (size_t h = 0; h < scheme.halves(); ++h)
      std::memcpy(record + at + (h * kColumns + place) * size,
                  static_cast<const uint8_t *>(from) + h * size, size);
  };
  const auto pick = [](size_t size, const void *floats, const void *halves, const void *bytes) {
    return size == 4 ? floats : size == 2 ? halves : bytes;
  };
  const size_t scale = scheme.scale_size(), minimum = scheme.minimum_size();
  put(scheme.value_bytes(), scale, pick(scale, block.scale, block.scale_bits, block.scale_byte));
  if (minimum)
    put(scheme.minima_at(), minimum,
        pick(minimum, block.minimum, block.minimum_bits, block.minimum_byte));
  if (scheme.scales != Scales::coarse) return;
  std::memcpy(header + 2 * place, block.scale_bits, 2);
  if (minimum) std::memcpy(header + 2 * (kColumns + place), block.minimum_bits, 2);
}

// Where the planes of a layout with so many bits begin in a record: nibbles, pairs, single bits.
struct Planes {
  int nibbles, pairs, single;  // -1: none
  int pairs_shift, single_shift;
  explicit Planes(int bits)
      : nibbles(bits >= 4 ? 0 : -1),
        pairs(bits == 6 ? 256 : bits < 4 ? 0 : -1),
        single(bits == 5 ? 256 : bits == 3 ? 128 : -1),
        pairs_shift(bits == 6 ? 4 : 0),
        single_shift(bits - 1) {}
};

// Values k of one column of a record whose values have less than 8 bits.
void put_bits(uint8_t *record, const Planes &planes, int column, const int8_t *value) {
  for (int k = 0; k < kGroup; ++k) {
    const int j = k / 4 % 4, upper = k / 16, at = column * 4 + k % 4;
    const auto bits = static_cast<unsigned>(value[k]);
    const auto put = [&](int place, unsigned part, int shift) {
      record[place + at] = static_cast<uint8_t>(record[place + at] | part << shift);
    };
    if (planes.nibbles >= 0) put(planes.nibbles + 64 * j, bits & 15, 4 * upper);
    if (planes.pairs >= 0)
      put(planes.pairs + j / 2 * 64, bits >> planes.pairs_shift & 3, j % 2 * 4 + 2 * upper);
    if (planes.single >= 0) put(planes.single, bits >> planes.single_shift & 1, 2 * j + upper);
  }
}

int get_bits(const uint8_t *record, const Planes &planes, int column, int k) {
  const int j = k / 4 % 4, upper = k / 16, at = column * 4 + k % 4;
  int bits = 0;
  if (planes.nibbles >= 0) bits = record[planes.nibbles + 64 * j + at] >> 4 * upper & 15;
  if (planes.pairs >= 0)
    bits |= (record[planes.pairs + j / 2 * 64 + at] >> (j % 2 * 4 + 2 * upper) & 3)
            << planes.pairs_shift;
  if (planes.single >= 0)
    bits |= (record[planes.single + at] >> (2 * j + upper) & 1) << planes.single_shift;
  return bits;
}

// The values of 16 columns of one group.
void put_values(uint8_t *record, const Scheme &scheme, const Block *blocks) {
  if (scheme.bits() == 8) {
    for (int j = 0; j < 8; ++j)
      for (int c = 0; c < kColumns; ++c)
        std::memcpy(record + j * 64 + c * 4, blocks[c].value + 4 * j, 4);
  } else if (scheme.bits() == 4) {
    for (int j = 0; j < 4; ++j)
      for (int c = 0; c < kColumns; ++c) {
        uint32_t first, second;
        std::memcpy(&first, blocks[c].value + 4 * j, 4);
        std::memcpy(&second, blocks[c].value + 16 + 4 * j, 4);
        first |= second << 4;
        std::memcpy(record + j * 64 + c * 4, &first, 4);
      }
  } else {
    std::memset(record, 0, scheme.value_bytes());
    const Planes planes(scheme.bits());
    for (int c = 0; c < kColumns; ++c) put_bits(record, planes, c, blocks[c].value);
  }
}

// One row of 4- or 2-byte values, or of doubles that become float32, into its column.
void put_floats(uint8_t *panel, int column, bool doubles, size_t item, const uint8_t *from, size_t depth) {
  for (size_t k = 0; k < depth; ++k) {
    uint8_t *to = panel + (k * kColumns + static_cast<size_t>(column)) * item;
    if (doubles) {
      double wide;
      std::memcpy(&wide, from + k * 8, 8);
      float value = static_cast<float>(wide);
      std::memcpy(to, &value, 4);
    } else {
      std::memcpy(to, from + k * item, item);
    }
  }
}

}  // namespace

void unpack(const Scheme &scheme, const uint8_t *panel, int32_t group, int column, Column &out) {
  const uint8_t *record = panel + scheme.record_at(group), *header = panel + scheme.header_at(group);
  const size_t place = static_cast<size_t>(column);
  const auto half = [](const uint8_t *at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return half_value(bits);
  };
  const auto read = [&](size_t at, size_t size, size_t h) {
    const uint8_t *from = record + at + ((scheme.fine ? h : 0) * kColumns + place) * size;
    float value;
    if (size == 1) return static_cast<float>(static_cast<int8_t>(*from));
    if (size == 2) return half(from);
    std::memcpy(&value, from, 4);
    return value;
  };
  for (size_t h = 0; h < 2; ++h) {
    out.scale[h] = read(scheme.value_bytes(), scheme.scale_size(), h);
    out.minimum[h] =
        scheme.minimum ? read(scheme.minima_at(), scheme.minimum_size(), h) : 0.0f;
    if (scheme.scales == Scales::zeroed) out.minimum[h] *= out.scale[h];
    if (scheme.scales != Scales::coarse) continue;
    out.scale[h] *= half(header + 2 * place);
    if (scheme.minimum) out.minimum[h] *= half(header + 2 * (kColumns + place));
  }
  const Planes planes(scheme.bits());
  for (int k = 0; k < kGroup; ++k) {
    if (scheme.bits() == 8) {
      out.value[k] = static_cast<int8_t>(record[k / 4 * 64 + column * 4 + k % 4]);
      continue;
    }
    const int bits = get_bits(record, planes, column, k);
    out.value[k] = scheme.coded() ? scheme.codes()[bits]
                                  : static_cast<int8_t>(bits - scheme.offset());
  }
}

int32_t Weight::panel_rows(const Segment &segment, int32_t panel, const uint8_t **rows,
                           const SourceFormat **formats) const {
  int32_t first = segment.first + panel * kColumns;
  int32_t count = std::min(kColumns, segment.columns - panel * kColumns);
  for (int32_t c = 0; c < count; ++c) {
    const Source *source;
    rows[c] = row(first + c, &source);
    formats[c] = &find_format(source->format);
  }
  return count;
}

void Weight::pack_quantized(const Segment &segment, int32_t panel, uint8_t *out) const {
  const uint8_t *rows[kColumns];
  const SourceFormat *formats[kColumns];
  int32_t count = panel_rows(segment, panel, rows, formats);
  const Scheme &scheme = segment.scheme;
  Block blocks[kColumns];
  std::memset(blocks, 0, sizeof blocks);
  for (int32_t g = 0; g < groups(); ++g) {
    uint8_t *record = out + scheme.record_at(g), *header = out + scheme.header_at(g);
    for (int32_t c = 0; c < count; ++c) formats[c]->decode(rows[c], g, blocks[c]);
    put_values(record, scheme, blocks);
    for (int32_t c = 0; c < kColumns; ++c) put_scales(record, header, scheme, c, blocks[c]);
  }
}

void Weight::pack_floats(const Segment &segment, int32_t panel, uint8_t *out) const {
  const uint8_t *rows[kColumns];
  const SourceFormat *formats[kColumns];
  int32_t count = panel_rows(segment, panel, rows, formats);
  std::memset(out, 0, segment.panel_bytes);
  for (int32_t c = 0; c < count; ++c)
    put_floats(out, c, formats[c]->bytes == 8, segment.scheme.layout == Layout::f32 ? 4 : 2, rows[c],
               static_cast<size_t>(depth_));
}

void Weight::pack(uint8_t *data, Pool &pool) {
  for (const Segment &segment : segments_) {
    pool.each(segment.panels, [&](int32_t panel) {
      uint8_t *out = data + segment.offset + segment.panel_bytes * static_cast<size_t>(panel);
      if (segment.scheme.quantized()) {
        pack_quantized(segment, panel, out);
      } else {
        pack_floats(segment, panel, out);
      }
    });
  }
  for (const Source &source : sources_) {
    size_t bytes = find_format(source.format).row_bytes(depth_) * static_cast<size_t>(source.rows);
    if (source.release) release(source.data, bytes);
  }
  data_ = data;
}

bool Weight::quantized() const {
  return std::any_of(segments_.begin(), segments_.end(),
                     [](const Segment &s) { return s.scheme.quantized(); });
}

bool Weight::fine() const {
  return std::any_of(segments_.begin(), segments_.end(),
                     [](const Segment &s) { return s.scheme.quantized() && s.scheme.fine; });
}

std::string Weight::layouts() const {
  std::string text;
  for (const Segment &segment : segments_) {
    std::string name = segment.scheme.name();
    if (text.find(name) == std::string::npos) text += (text.empty() ? "" : "+") + name;
  }
  return text;
}

}  // namespace hr
