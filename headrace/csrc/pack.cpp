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
  std::string text = layout == Layout::n4 ? "n4" : "b8";
  text += fine ? "g16" : "g32";
  text += half ? "-f16" : "-f32";
  return minimum ? text + "-min" : text;
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
    size_t groups = static_cast<size_t>(this->groups()), depth = static_cast<size_t>(depth_);
    segment.panel_bytes = segment.scheme.quantized()
                              ? groups * static_cast<size_t>(segment.scheme.group_bytes())
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

void put_scales(uint8_t *record, const Scheme &scheme, int column, const Block &block) {
  uint8_t *at = record + (scheme.layout == Layout::n4 ? 256 : 512);
  int halves = scheme.fine ? 2 : 1;
  for (int kind = 0; kind < (scheme.minimum ? 2 : 1); ++kind) {
    for (int h = 0; h < halves; ++h) {
      size_t slot = static_cast<size_t>((kind * halves + h) * kColumns + column);
      const float *values = kind == 0 ? block.scale : block.minimum;
      if (scheme.half) {
        const uint16_t *bits = kind == 0 ? block.scale_bits : block.minimum_bits;
        std::memcpy(at + slot * 2, &bits[h], 2);
      } else {
        std::memcpy(at + slot * 4, &values[h], 4);
      }
    }
  }
}

// The values of 16 columns of one group, four at a time.
void put_values(uint8_t *record, const Scheme &scheme, const Block *blocks) {
  const bool nibbles = scheme.layout == Layout::n4;
  const uint32_t turned = nibbles && !scheme.minimum ? 0x08080808u : 0;
  for (int j = 0; j < 4; ++j) {
    for (int c = 0; c < kColumns; ++c) {
      uint32_t first, second;
      std::memcpy(&first, blocks[c].value + 4 * j, 4);
      std::memcpy(&second, blocks[c].value + 16 + 4 * j, 4);
      if (nibbles) {
        // Without a minimum -8 to 7 become 0 to 15: two's complement with the sign bit turned.
        first = (first & 0x0f0f0f0fu) ^ turned;
        second = (second & 0x0f0f0f0fu) ^ turned;
        first |= second << 4;
        std::memcpy(record + j * 64 + c * 4, &first, 4);
      } else {
        std::memcpy(record + j * 64 + c * 4, &first, 4);
        std::memcpy(record + (j + 4) * 64 + c * 4, &second, 4);
      }
    }
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
    uint8_t *record = out + static_cast<size_t>(g) * static_cast<size_t>(scheme.group_bytes());
    for (int32_t c = 0; c < count; ++c) formats[c]->decode(rows[c], g, blocks[c]);
    put_values(record, scheme, blocks);
    for (int32_t c = 0; c < kColumns; ++c) put_scales(record, scheme, c, blocks[c]);
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
