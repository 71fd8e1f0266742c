// The quantized block types of checkpoints, read one group of 32 values at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "pack.h"

namespace hr {

// A group: value[k] * scale + minimum, with one scale for each half of the group (equal ones where the
// format has a single one). Schemes with float16 scales take the bits as they are in the checkpoint.
struct Block {
  int8_t value[kGroup];
  float scale[2], minimum[2];
  uint16_t scale_bits[2], minimum_bits[2];
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

// Throws std::invalid_argument for an unknown name.
const SourceFormat &find_format(const std::string &name);

}  // namespace hr
