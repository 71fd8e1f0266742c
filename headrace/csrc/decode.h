// The quantized block types of checkpoints, read one group of 32 values at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "pack.h"

namespace hr {

// A group as its scheme stores it (pack.h), with one scale for each half of the group (equal ones where
// the format has a single one). scale, minimum: for float32 ones. The bits are float16: the scales and
// minima themselves, or what the bytes of coarse ones are multiplied with (those of half 0).
struct Block {
  int8_t value[kGroup];
  float scale[2], minimum[2];
  uint16_t scale_bits[2], minimum_bits[2];
  int8_t scale_byte[2], minimum_byte[2];
};

// Reads group `group` of the row at `row`.
using Decoder = void (*)(const uint8_t *row, int32_t group, Block &block);

struct SourceFormat {
  const char *name;
  int32_t values, bytes;  // of a block
  Scheme scheme;
  Decoder decode;  // null for float formats
  size_t row_bytes(int32_t depth) const {
    return static_cast<size_t>(depth / values) * static_cast<size_t>(bytes);
  }
};

// IEEE half to float, for finite values.
float half_value(uint16_t bits);

// Throws std::invalid_argument for an unknown name.
const SourceFormat &find_format(const std::string &name);

}  // namespace hr
