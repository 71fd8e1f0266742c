// Linear, logits and embedding: the ops that read packed weights.
#pragma once
#include <memory>
#include <vector>

#include "pack.h"
#include "runtime.h"

namespace hr {

// Rows of activations quantized for a linear: int8 [32 G], then for each of the G groups of 32 a float32
// scale, the sum of the group as float32 (scale times the whole sum) and as int32, then both sums for
// half groups, [2 G] each.
struct QuantizedRow {
  explicit QuantizedRow(int32_t groups)
      : scale(size_t{32} * static_cast<size_t>(groups)),
        sum(scale + size_t{4} * static_cast<size_t>(groups)),
        whole(sum + size_t{4} * static_cast<size_t>(groups)),
        half_sum(whole + size_t{4} * static_cast<size_t>(groups)),
        half_whole(half_sum + size_t{8} * static_cast<size_t>(groups)),
        bytes((half_whole + size_t{8} * static_cast<size_t>(groups) + 63) / 64 * 64) {}
  size_t scale, sum, whole, half_sum, half_whole, bytes;  // offsets, and the stride of rows
};

struct LinearArgs {
  const float *x;  // [rows, weight depth]
  float *out;      // [rows, weight columns]
  const Weight *weight;
  const float *bias;   // or null
  uint8_t *quantized;  // room for the rows of x as QuantizedRow, shared by all linears
  bool logits;         // rows are the logits rows, gathered from x, else all tokens
  float scale;         // of the result
  float softcap;       // 0: none
  int32_t threads;
};

struct EmbedArgs {
  float *out;
  const Weight *table;
  const Weight *positions;  // or null
  float scale;
};

// Sustained rates of one thread, for the machine's limits. Each runs for about `seconds`.
struct Limits {
  double (*dot4)(double seconds);   // nibble x int8 multiply-adds a second
  double (*dot8)(double seconds);   // int8 x int8
  double (*fma)(double seconds);    // float32
  double (*read)(const uint8_t *data, size_t bytes, double seconds);  // bytes a second
};

#define HR_DECLARE_LINEAR(level)                                                 \
  namespace level {                                                              \
  /* the quantization of the activations, where the weight needs it, then the linear */ \
  std::vector<std::unique_ptr<Instruction>> make_linear(const LinearArgs &);     \
  std::unique_ptr<Instruction> make_embed(const EmbedArgs &);                    \
  const Limits &limits();                                                        \
  }
HR_DECLARE_LINEAR(portable)
HR_DECLARE_LINEAR(avx2)
HR_DECLARE_LINEAR(avx512)

}  // namespace hr
