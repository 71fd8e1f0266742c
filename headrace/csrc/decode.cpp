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

void set_scale(Block &block, const uint8_t *at) {
  block.scale_bits[0] = block.scale_bits[1] = half_bits(at);
}
void set_minimum(Block &block, const uint8_t *at) {
  block.minimum_bits[0] = block.minimum_bits[1] = half_bits(at);
}
// The minimum of K blocks is taken off.
void set_negative_minimum(Block &block, const uint8_t *at) {
  block.minimum_bits[0] = block.minimum_bits[1] = static_cast<uint16_t>(half_bits(at) ^ 0x8000u);
}

void nibbles(const uint8_t *at, Block &block) {
  for (int i = 0; i < 16; ++i) {
    block.value[i] = static_cast<int8_t>(at[i] & 15);
    block.value[i + 16] = static_cast<int8_t>(at[i] >> 4);
  }
}
void q4_0(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 18;
  set_scale(block, at);
  nibbles(at + 2, block);
}
void q4_1(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 20;
  set_scale(block, at);
  set_minimum(block, at + 2);
  nibbles(at + 4, block);
}
void fifth_bits(const uint8_t *at, Block &block) {
  for (int i = 0; i < 32; ++i)
    block.value[i] = static_cast<int8_t>(block.value[i] + ((at[i / 8] >> i % 8 & 1) << 4));
}
void q5_0(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 22;
  set_scale(block, at);
  nibbles(at + 6, block);
  fifth_bits(at + 2, block);
}
void q5_1(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 24;
  set_scale(block, at);
  set_minimum(block, at + 2);
  nibbles(at + 8, block);
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
  set_scale(block, at + 80);
  set_negative_minimum(block, at + 82);
  for (int h = 0; h < 2; ++h) {
    block.scale_byte[h] = static_cast<int8_t>(at[part * 2 + h] & 15);
    block.minimum_byte[h] = static_cast<int8_t>(at[part * 2 + h] >> 4);
  }
  for (int i = 0; i < 32; ++i)
    block.value[i] = static_cast<int8_t>(pair_of(at + 16 + part / 4 * 32, part % 4, i));
}

void q3_k(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 110;
  int part = g % 8;
  set_scale(block, at + 108);
  for (int h = 0; h < 2; ++h) {
    int s = part * 2 + h;
    int low = s < 8 ? at[96 + s] & 15 : at[96 + s - 8] >> 4;
    int high = at[104 + s % 4] >> 2 * (s / 4) & 3;
    block.scale_byte[h] = static_cast<int8_t>((low | high << 4) - 32);
  }
  for (int i = 0; i < 32; ++i) {
    int present = at[i] >> part & 1;
    int value = pair_of(at + 32 + part / 4 * 32, part % 4, i);
    block.value[i] = static_cast<int8_t>(value | present << 2);
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
  set_scale(block, at);
  set_negative_minimum(block, at + 2);
  block.scale_byte[0] = block.scale_byte[1] = static_cast<int8_t>(scale);
  block.minimum_byte[0] = block.minimum_byte[1] = static_cast<int8_t>(minimum);
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
  set_scale(block, at + 208);
  for (int h = 0; h < 2; ++h) block.scale_byte[h] = static_cast<int8_t>(at[192 + part * 2 + h]);
  for (int i = 0; i < 32; ++i) {
    int low = at[run * 64 + place % 2 * 32 + i] >> place / 2 * 4 & 15;
    int high = pair_of(at + 128 + run * 32, place, i);
    block.value[i] = static_cast<int8_t>(low | high << 4);
  }
}

void iq4_nl(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 18;
  set_scale(block, at);
  nibbles(at + 2, block);
}

void iq4_xs(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g / 8 * 136;
  int part = g % 8;
  int low = at[4 + part / 2] >> part % 2 * 4 & 15;
  int high = half_bits(at + 2) >> 2 * part & 3;
  set_scale(block, at);
  block.scale_byte[0] = block.scale_byte[1] = static_cast<int8_t>((low | high << 4) - 32);
  nibbles(at + 8 + part * 16, block);
}

void mxfp4(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 17;
  // 2^(e - 128), since the table holds doubled values; the two lowest exponents are subnormal.
  uint32_t bits = at[0] < 2 ? 0x200000u << at[0] : static_cast<uint32_t>(at[0] - 1) << 23;
  std::memcpy(&block.scale[0], &bits, 4);
  block.scale[1] = block.scale[0];
  nibbles(at + 1, block);
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
  nibbles(at + 8, block);
}
void i4z(const uint8_t *row, int32_t g, Block &block) {
  const uint8_t *at = row + g * 19;
  set_scale(block, at);
  // The zero point times the scale is taken off.
  block.minimum_byte[0] = block.minimum_byte[1] =
      static_cast<int8_t>(-static_cast<int8_t>(at[2]));
  nibbles(at + 3, block);
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

constexpr Scheme floats(Layout layout) { return {layout, Scales::single, false, false}; }

const SourceFormat kFormats[] = {
    {"F32", 1, 4, floats(Layout::f32), nullptr},
    {"F16", 1, 2, floats(Layout::f16), nullptr},
    {"BF16", 1, 2, floats(Layout::bf16), nullptr},
    {"F64", 1, 8, floats(Layout::f32), nullptr},
    {"Q4_0", 32, 18, {Layout::n4, Scales::half, false, false}, q4_0},
    {"Q4_1", 32, 20, {Layout::n4, Scales::half, true, false}, q4_1},
    {"Q5_0", 32, 22, {Layout::n5, Scales::half, false, false}, q5_0},
    {"Q5_1", 32, 24, {Layout::n5, Scales::half, true, false}, q5_1},
    {"Q8_0", 32, 34, {Layout::b8, Scales::half, false, false}, q8_0},
    {"Q2_K", 256, 84, {Layout::n2, Scales::coarse, true, true}, q2_k},
    {"Q3_K", 256, 110, {Layout::n3, Scales::coarse, false, true}, q3_k},
    {"Q4_K", 256, 144, {Layout::n4, Scales::coarse, true, false}, q4_k},
    {"Q5_K", 256, 176, {Layout::n5, Scales::coarse, true, false}, q5_k},
    {"Q6_K", 256, 210, {Layout::n6, Scales::coarse, false, true}, q6_k},
    {"IQ4_NL", 32, 18, {Layout::iq4, Scales::half, false, false}, iq4_nl},
    {"IQ4_XS", 256, 136, {Layout::iq4, Scales::coarse, false, false}, iq4_xs},
    {"MXFP4", 32, 17, {Layout::fp4, Scales::single, false, false}, mxfp4},
    {"I4", 32, 24, {Layout::n4, Scales::single, true, false}, i4},
    {"I4Z", 32, 19, {Layout::n4, Scales::zeroed, true, false}, i4z},
    {"I8", 32, 36, {Layout::b8, Scales::single, false, false}, i8},
    {"I8M", 32, 40, {Layout::b8, Scales::single, true, false}, i8m},
};

}  // namespace

float half_value(uint16_t bits) {
  uint32_t magnitude = (bits & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  return bits & 0x8000u ? -value : value;
}

const SourceFormat &find_format(const std::string &name) {
  for (const SourceFormat &format : kFormats)
    if (name == format.name) return format;
  throw std::invalid_argument("no packing for weights of type " + name);
}

}  // namespace hr
