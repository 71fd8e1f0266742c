// The contract between the CPU back-end's runtime and its kernels.
//
// A program is a list of instructions, built once at load. One step runs them in order on all threads:
// each instruction says how many pieces the step has, threads claim pieces from an atomic counter, and
// an instruction begins when all pieces of the one before are done. Buffers are fixed addresses; per
// step only the counts change.
//
// Every kernel keeps row independence: the bits of a row depend on that row and its KV alone, whatever
// the other rows, the piece boundaries and the thread that claims them. No fast-math; contraction is
// off (-ffp-contract=off) and fused multiply-adds are explicit.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hr {

// The arrays of headrace.ops.batch.RaggedBatch, same names, same meaning. Bound at load and again when
// the Python object's generation changes.
struct Batch {
  const int32_t *token, *position;
  const int32_t *slice_row, *slice_slot;
  const int32_t *table;  // [slots][table_rows][max_blocks]
  int32_t table_rows, max_blocks;
  const int32_t *logits_row;
  const int32_t *copy;
  const int32_t *sample_row, *forced;
  const float *temperature;
  const int32_t *top_k;
  const float *top_p, *min_p, *repetition, *presence, *frequency;
  const uint64_t *seed;
  const int32_t *choice, *sample_position, *top_logprobs;
  const int32_t *penalty_start, *penalty_token, *penalty_count;
  const int32_t *bias_start, *bias_token;
  const float *bias_value;
  const int32_t *mask_index;
  const uint32_t *masks;
  int32_t mask_words;
  int32_t *out_token;
  float *out_logprob;
  int32_t *out_rank, *out_top_token;
  float *out_top_logprob;
  int32_t max_top;  // columns of out_top_*
};

// What one step runs on: the batch and its counts.
struct Step {
  const Batch *batch;
  int32_t tokens, slices, logits, samples, copies;
};

// Bytes of scratch that a thread hands to an instruction's pieces. Instructions state what they need
// when they are made (scratch_bytes); the runtime allocates the largest, 64-byte aligned, per thread.
struct Scratch {
  uint8_t *data;
  size_t bytes;
};

class Instruction {
 public:
  virtual ~Instruction() = default;
  // Name of the op and of the chosen kernel path, for logs, metrics and --strict-kernels.
  std::string op, path;
  // Number of independent pieces of this step, 0 when there is nothing to do. Called at every
  // step: cheap.
  virtual int32_t pieces(const Step &step) const = 0;
  virtual void run(const Step &step, int32_t piece, Scratch &scratch) const = 0;
  virtual size_t scratch_bytes() const { return 0; }
  // Bytes that the instruction itself allocated when it was made, for the memory plan. Makers never read
  // through the pointers they are given (the plan makes a program over null addresses).
  virtual size_t owned_bytes() const { return 0; }
  // What the step moves and computes, for GB/s and GOPS in `headrace bench kernels`.
  virtual double bytes(const Step &) const { return 0; }
  virtual double flops(const Step &) const { return 0; }
};

// --- Arguments of the ops (see headrace/ops/spec.py for what they mean) -------------------------
// Buffers are float32, row-major, `stride` = width unless a stride is given.

enum class NormKind { rms, layer, none };
struct NormArgs {
  const float *x;
  float *out;
  float *residual;  // or null
  const float *weight, *bias;  // or null
  int32_t width;
  float eps, residual_scale;
  NormKind kind;
};

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, swiglu_oai };
struct GatedArgs {
  const float *x;  // [T, 2n] or [T, n]
  float *out;      // [T, n]
  int32_t width;   // n
  Activation activation;
  bool gated;
};

// Geometry of KV pages. Inside a page: [layer in page][kv head][K tiles | V rows][...], where for f16
//   K: [block_size / 16][head_dim][16]  (transposed in tiles of 16 tokens: lanes are tokens)
//   V: [block_size][head_dim]
// f32 the same with 4-byte values. int8: the same values as int8, then float32 scales
//   [2][block_size] (K then V) after the values of each (layer, kv head).
enum class KVType { f16, f32, int8 };
struct KVGeometry {
  uint8_t *pages;
  size_t page_bytes, layer_bytes, head_bytes;  // head_bytes = layer_bytes / kv_heads (K and V)
  int32_t block_size, kv_heads, head_dim;
  KVType type;
};

struct RopeStoreArgs {
  const float *qkv;
  float *out;
  KVGeometry kv;
  int32_t table_row, layer_in_page;
  int32_t heads;
  const float *cos, *sin;  // [max_positions][rotary / 2], or null; already times rope_scale
  int32_t rotary;          // values of a head that turn
  bool pairs;              // style 'pairs', else 'halves'
  const float *q_norm, *k_norm;  // or null
  bool norm_row;                 // norm over the row, else over each head
  float eps;
  // > 0: the tables hold the turns of positions 0 to low_rows - 1, then those of whole multiples of
  // low_rows; a position's turn is the product of two (cos and sin of a sum).
  int32_t low_rows;
  float *near;  // or null: q turned as at min(position, near_position)
  int32_t near_position;
};

struct AttentionArgs {
  const float *q;
  float *out;
  KVGeometry kv;
  int32_t table_row, layer_in_page;
  int32_t heads;
  float scale;
  int32_t window;  // 0: none
  int32_t first;
  float softcap;  // 0: none
  const float *sinks;  // or null
  int32_t max_rows, max_positions;
  int32_t threads;
  // Memory that the instructions of one attention hand on among themselves (partials of spans), shared
  // by all layers, 64-byte aligned; `attention_shared_bytes` says how much.
  uint8_t *shared;
  bool has_near;      // near is the query of the kept-first tokens
  const float *near;
};

struct SampleArgs {
  float *logits;  // [R][stride]; not changed for rows that several samples read
  int32_t vocabulary, stride;
};

struct CopyArgs {
  KVGeometry kv;
  int32_t layers_per_page;
};

// --- Makers: each level (portable, avx2, avx512) defines all of these in its own namespace --------
#define HR_DECLARE_MAKERS(level)                                             \
  namespace level {                                                          \
  std::unique_ptr<Instruction> make_norm(const NormArgs &);                  \
  std::unique_ptr<Instruction> make_gated(const GatedArgs &);                \
  std::unique_ptr<Instruction> make_rope_store(const RopeStoreArgs &);       \
  /* attention may be several instructions (spans, then merge) */            \
  size_t attention_shared_bytes(const AttentionArgs &);                      \
  std::vector<std::unique_ptr<Instruction>> make_attention(const AttentionArgs &); \
  /* returns the sampling pass or passes */                                  \
  std::vector<std::unique_ptr<Instruction>> make_sample(const SampleArgs &); \
  std::unique_ptr<Instruction> make_copy(const CopyArgs &);                  \
  }
HR_DECLARE_MAKERS(portable)
HR_DECLARE_MAKERS(avx2)
HR_DECLARE_MAKERS(avx512)

}  // namespace hr
