// Passes over one row of logits, and lists of candidates taken from it.
//
// The row is read in blocks of kBlock vectors. A scan keeps, for each block, the maximum of each
// lane (a *cell*: kBlock values): whatever follows then reads only the blocks that matter.
#pragma once
#include <algorithm>
#include <cfloat>
#include <limits>

#include "rows.h"
#include "vmath.h"

namespace hr {
namespace HR_LEVEL {
namespace {

constexpr int32_t kBlock = 64;
constexpr int32_t kBlockValues = kBlock * W;
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Candidate {
  float x;
  int32_t id;
};
// Order of choice: highest first, ties to the lowest id.
struct Before {
  bool operator()(const Candidate &a, const Candidate &b) const {
    return a.x > b.x || (a.x == b.x && a.id < b.id);
  }
};

// The last, short vector of a row, with -infinity behind the end.
HR_INLINE F load_end(const float *x, int32_t count) {
  alignas(64) float part[W];
  for (int32_t i = 0; i < W; i++) part[i] = i < count ? x[i] : kNone;
  return load(part);
}

// One row of logits with its scan. A value that is not a number counts as -infinity.
struct Row {
  const float *x;
  int32_t count;
  float *cells;  // [blocks()][W]
  float top;

  int32_t blocks() const { return ceil_div(count, kBlockValues); }
  int32_t block_end(int32_t block) const { return lesser(count, (block + 1) * kBlockValues); }

  // Fills cells and top.
  void scan() {
    F all = set(kNone);
    for (int32_t block = 0; block < blocks(); block++) {
      const int32_t end = block_end(block);
      F most[4] = {set(kNone), set(kNone), set(kNone), set(kNone)};
      int32_t i = block * kBlockValues;
      for (; i + 4 * W <= end; i += 4 * W)
        for (int k = 0; k < 4; k++) most[k] = max(load(x + i + k * W), most[k]);
      for (; i + W <= end; i += W) most[0] = max(load(x + i), most[0]);
      if (i < end) most[1] = max(load_end(x + i, end - i), most[1]);
      const F cell = max(max(most[0], most[1]), max(most[2], most[3]));
      store(cells + block * W, cell);
      all = max(cell, all);
    }
    top = reduce_max(all);
  }

  // Whether some value of the block is at least `least`.
  bool reaches(int32_t block, float least) const {
    return bits(set(least) <= load(cells + block * W)) != 0;
  }

  // The lowest id that has the maximum.
  int32_t first_top() const {
    if (top == kNone) return 0;
    for (int32_t block = 0; block < blocks(); block++) {
      if (!reaches(block, top)) continue;
      for (int32_t i = block * kBlockValues; i < block_end(block); i++)
        if (x[i] == top) return i;
    }
    return 0;
  }

  // A value that at least `k` values reach (all finite ones where that is not known).
  float floor_of_top(int32_t k, float *spare) const {
    const int32_t cell_count = blocks() * W;
    if (k > cell_count) return -FLT_MAX;
    std::memcpy(spare, cells, sizeof(float) * cell_count);
    std::nth_element(spare, spare + k - 1, spare + cell_count,
                     [](float a, float b) { return a > b; });
    return std::max(spare[k - 1], -FLT_MAX);
  }

  // All values that reach `least`, by id. Returns how many.
  int32_t collect(float least, Candidate *out) const {
    const F bound = set(least);
    int32_t n = 0;
    for (int32_t block = 0; block < blocks(); block++) {
      if (!reaches(block, least)) continue;
      const int32_t end = block_end(block);
      for (int32_t i = block * kBlockValues; i < end; i += W) {
        const F v = i + W <= end ? load(x + i) : load_end(x + i, end - i);
        for (uint32_t hits = bits(bound <= v); hits; hits &= hits - 1) {
          const int32_t id = i + __builtin_ctz(hits);
          out[n++] = {x[id], id};
        }
      }
    }
    return n;
  }

  // The k highest, in order. Returns how many there are (fewer where the rest is -infinity).
  int32_t highest(int32_t k, Candidate *out, float *spare) const {
    int32_t n = collect(floor_of_top(k, spare), out);
    if (n > k) {
      std::nth_element(out, out + k, out + n, Before());
      n = k;
    }
    std::sort(out, out + n, Before());
    return n;
  }

  // Sum of exp((x - top) * scale), in float32 by block, in float64 over the blocks.
  double sum_exp(float scale) const {
    const F shift = set(top), factor = set(scale);
    double sum = 0;
    for (int32_t block = 0; block < blocks(); block++) {
      const int32_t end = block_end(block);
      F part[2] = {zero(), zero()};
      int32_t i = block * kBlockValues;
      for (; i + 2 * W <= end; i += 2 * W)
        for (int k = 0; k < 2; k++)
          part[k] = part[k] + exp((load(x + i + k * W) - shift) * factor);
      for (; i < end; i += W) {
        const F v = i + W <= end ? load(x + i) : load_end(x + i, end - i);
        part[0] = part[0] + exp((v - shift) * factor);
      }
      sum += reduce_add(part[0] + part[1]);
    }
    return sum;
  }

  // How many are before `id` in order of value, ties by id.
  int32_t count_before(int32_t id) const {
    const bool none = !(x[id] > kNone);
    const F own = set(none ? kNone : x[id]);
    int32_t n = none ? id : 0, i = 0;  // all ids before tie with -infinity, or are above it
    for (; !none && i < id; i += W) {
      const F v = i + W <= id ? load(x + i) : load_end(x + i, id - i);
      n += __builtin_popcount(bits(own <= v));
    }
    for (i = id + 1; i < count; i += W) {
      const F v = i + W <= count ? load(x + i) : load_end(x + i, count - i);
      n += __builtin_popcount(bits(own < v));
    }
    return n;
  }
};

}  // namespace
}  // namespace HR_LEVEL
}  // namespace hr
