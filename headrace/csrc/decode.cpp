#include "decode.h"

#include <cstring>
#include <stdexcept>

namespace hr {
namespace {

uint16_t half_bits(const uint8_t *at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return bits;
}

// IEEE half to float; blocks hold finite values.
float half(uint16_t bits) {
  uint32_t magnitude = (bits & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  return bits & 0x8000u ? -value : value;
}
float half(const uint8_t *at) { return half(half_bits(at)); }

void set_scale(Block &block, const uint8_t *at) {
  block.scale_bits[0] = block.scale_bits[1] = half_bits(at);
  block.scale[0] = block.scale[1] = half(at);
}
void set_minimum(Block &block, const uint8_t *at) {
  block.minimum_bits[0] = block.minimum_bits[1] = half_bits(at);
  block.minimum[0] = block.minimum[1] = half(at);
}

const int8_t kCode[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t kFloat4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void nibbles(const uint8_t *at, Block &block, int offset) {
  for (int i = 0; i < 16; ++i) {
    block.value[i] = static_cast<int8_t>((at[i] & 15) - offset);
    block.value[i + 16] = static_cast<int8_t>((at[i] >> 4) - offset);
  }
}
void codes(const uint8_t *at, Block &block, const int8_t *table) {
  for (int i = 0; i < 16; ++i) {
    block.value[i] = table[at[i] & 15];
    block.value[i + 16] = table[at[i] >> 4];
  }
}

void q4_0(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 18;
  set_scale(block, at);
  nibbles(at + 2, block, 8);
}
void q4_1(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 20;
  set_scale(block, at);
  set_minimum(block, at + 2);
  nibbles(at + 4, block, 0);
}
void fifth_bits(const uint8_t *at, Block &block) {
  for (int i = 0; i < 32; ++i)
    block.value[i] = static_cast<int8_t>(block.value[i] + ((at[i / 8] >> i % 8 & 1) << 4));
}
void q5_0(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 22;
  set_scale(block, at);
  nibbles(at + 6, block, 16);
  fifth_bits(at + 2, block);
}
void q5_1(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 24;
  set_scale(block, at);
  set_minimum(block, at + 2);
  nibbles(at + 8, block, 0);
  fifth_bits(at + 4, block);
}
void q8_0(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 34;
  set_scale(block, at);
  std::memcpy(block.value, at + 2, kGroup);
}

// Pairs of bits: in each run of 32 bytes the four groups lie in bits 0-1, 2-3, 4-5, 6-7.
int pair_of(const uint8_t *run, int part, int i) { return run[i] >> 2 * part & 3; }

void q2_k(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 84;
  int part = g % 8;
  for (int h = 0; h < 2; ++h) {
    uint8_t scales = at[part * 2 + h];
    block.scale[h] = half(at + 80) * static_cast<float>(scales & 15);
    block.minimum[h] = -(half(at + 82) * static_cast<float>(scales >> 4));
  }
  for (int i = 0; i < 32; ++i)
    block.value[i] = static_cast<int8_t>(pair_of(at + 16 + part / 4 * 32, part % 4, i));
}

void q3_k(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 110;
  int part = g % 8;
  for (int h = 0; h < 2; ++h) {
    int s = part * 2 + h;
    int low = s < 8 ? at[96 + s] & 15 : at[96 + s - 8] >> 4;
    int high = at[104 + s % 4] >> 2 * (s / 4) & 3;
    block.scale[h] = half(at + 108) * static_cast<float>((low | high << 4) - 32);
  }
  for (int i = 0; i < 32; ++i) {
    int present = at[i] >> part & 1;
    int value = pair_of(at + 32 + part / 4 * 32, part % 4, i);
    block.value[i] = static_cast<int8_t>(value - (present ? 0 : 4));
  }
}

void six_bit_scales(const uint8_t *at, int part, Block &block) {
  const uint8_t *packed = at + 4;
  int scale, minimum;
  if (part < 4) {
    scale = packed[part] & 63;
    minimum = packed[part + 4] & 63;
  } else {
    scale = (packed[part + 4] & 15) | (packed[part - 4] >> 2 & 48);
    minimum = packed[part + 4] >> 4 | (packed[part] >> 2 & 48);
  }
  block.scale[0] = block.scale[1] = half(at) * static_cast<float>(scale);
  block.minimum[0] = block.minimum[1] = -(half(at + 2) * static_cast<float>(minimum));
}

// In each run of 32 bytes the low nibbles are one group, the high ones the next.
int nibble_of(const uint8_t *packed, int part, int i) {
  return packed[part / 2 * 32 + i] >> part % 2 * 4 & 15;
}

void q4_k(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 144;
  six_bit_scales(at, g % 8, block);
  for (int i = 0; i < 32; ++i) block.value[i] = static_cast<int8_t>(nibble_of(at + 16, g % 8, i));
}

void q5_k(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 176;
  int part = g % 8;
  six_bit_scales(at, part, block);
  for (int i = 0; i < 32; ++i)
    block.value[i] =
        static_cast<int8_t>(nibble_of(at + 48, part, i) | (at[16 + i] >> part & 1) << 4);
}

void q6_k(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 210;
  int part = g % 8, run = part / 4, place = part % 4;
  for (int h = 0; h < 2; ++h) {
    int8_t scale = static_cast<int8_t>(at[192 + part * 2 + h]);
    block.scale[h] = half(at + 208) * static_cast<float>(scale);
  }
  for (int i = 0; i < 32; ++i) {
    int low = at[run * 64 + place % 2 * 32 + i] >> place / 2 * 4 & 15;
    int high = pair_of(at + 128 + run * 32, place, i);
    block.value[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

void iq4_nl(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 18;
  set_scale(block, at);
  codes(at + 2, block, kCode);
}

void iq4_xs(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 136;
  int part = g % 8;
  int low = at[4 + part / 2] >> part % 2 * 4 & 15;
  int high = half_bits(at + 2) >> 2 * part & 3;
  block.scale[0] = block.scale[1] = half(at) * static_cast<float>((low | high << 4) - 32);
  codes(at + 8 + part * 16, block, kCode);
}

void mxfp4(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 17;
  // 2^(e - 128), since the table holds doubled values; the two lowest exponents are subnormal.
  uint32_t bits = at[0] < 2 ? 0x200000u << at[0] : static_cast<uint32_t>(at[0] - 1) << 23;
  std::memcpy(&block.scale[0], &bits, 4);
  block.scale[1] = block.scale[0];
  codes(at + 1, block, kFloat4);
}

float single(const uint8_t *at) {
  float value;
  std::memcpy(&value, at, 4);
  return value;
}

// Our own blocks for checkpoints whose scales are no halves: see ops/formats.py.
void i4(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 24;
  block.scale[0] = block.scale[1] = single(at);
  block.minimum[0] = block.minimum[1] = single(at + 4);
  nibbles(at + 8, block, 0);
}
void i8(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 36;
  block.scale[0] = block.scale[1] = single(at);
  std::memcpy(block.value, at + 4, kGroup);
}
void i8m(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 40;
  block.scale[0] = block.scale[1] = single(at);
  block.minimum[0] = block.minimum[1] = single(at + 4);
  std::memcpy(block.value, at + 8, kGroup);
}

constexpr Scheme kNibbleHalf{Layout::n4, true, false, false};
constexpr Scheme kNibbleHalfMin{Layout::n4, true, true, false};
constexpr Scheme kNibbleMin{Layout::n4, false, true, false};
constexpr Scheme kNibbleFine{Layout::n4, false, false, true};
constexpr Scheme kNibbleFineMin{Layout::n4, false, true, true};
constexpr Scheme kByteHalf{Layout::b8, true, false, false};
constexpr Scheme kByteHalfMin{Layout::b8, true, true, false};
constexpr Scheme kByte{Layout::b8, false, false, false};
constexpr Scheme kByteMin{Layout::b8, false, true, false};
constexpr Scheme kByteFine{Layout::b8, false, false, true};

const SourceFormat kFormats[] = {
    {"F32", 1, 4, {Layout::f32, false, false, false}, nullptr},
    {"F16", 1, 2, {Layout::f16, false, false, false}, nullptr},
    {"BF16", 1, 2, {Layout::bf16, false, false, false}, nullptr},
    {"F64", 1, 8, {Layout::f32, false, false, false}, nullptr},
    {"Q4_0", 32, 18, kNibbleHalf, q4_0},
    {"Q4_1", 32, 20, kNibbleHalfMin, q4_1},
    {"Q5_0", 32, 22, kByteHalf, q5_0},
    {"Q5_1", 32, 24, kByteHalfMin, q5_1},
    {"Q8_0", 32, 34, kByteHalf, q8_0},
    {"Q2_K", 256, 84, kNibbleFineMin, q2_k},
    {"Q3_K", 256, 110, kNibbleFine, q3_k},
    {"Q4_K", 256, 144, kNibbleMin, q4_k},
    {"Q5_K", 256, 176, kByteMin, q5_k},
    {"Q6_K", 256, 210, kByteFine, q6_k},
    {"IQ4_NL", 32, 18, kByteHalf, iq4_nl},
    {"IQ4_XS", 256, 136, kByte, iq4_xs},
    {"MXFP4", 32, 17, kByte, mxfp4},
    {"I4", 32, 24, kNibbleMin, i4},
    {"I8", 32, 36, kByte, i8},
    {"I8M", 32, 40, kByteMin, i8m},
};

}  // namespace

const SourceFormat &find_format(const std::string &name) {
  for (const SourceFormat &format : kFormats)
    if (name == format.name) return format;
  throw std::invalid_argument("no packing for weights of type " + name);
}

}  // namespace hr
