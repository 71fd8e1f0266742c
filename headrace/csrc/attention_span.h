// Attention of a few queries over one span of keys, and the merge of spans.
//
// A row's result is defined span by span: within a span (kSpan keys at absolute positions) the
// softmax is taken against the span's own maximum; the spans' (maximum, sum, output) are then
// merged in ascending order. Every path, one thread or many, decode or prefill, follows that
// definition. Exponents are in base 2: queries are scaled by log2(e).
#pragma once
#include <limits>

#include "attention_kernels.h"
#include "rows.h"
#include "vmath.h"

namespace hr {
namespace HR_LEVEL {

constexpr float kLog2E = 1.44269504f;

// Keys [begin, end), counted in the tiles of a `Tiles` list.
struct Range {
  int begin, end;
  bool empty() const { return begin >= end; }
};

// What one query sees of a span: kept-first tokens, then its window, in ascending order.
struct Seen {
  Range part[2];
  bool empty() const { return part[0].empty() && part[1].empty(); }
};

// The tiles of one span and kv head that some query of a piece sees. No other page is touched: it
// may be gone. With a window they are two runs, the kept-first tokens and the windows, one where
// they meet.
template <class T>
struct Tiles {
  const T *k[kSpanTiles + kAhead], *v[kSpanTiles + kAhead];
  const float *k_scale[kSpanTiles], *v_scale[kSpanTiles];
  int count;  // tiles in all
  int kept;   // tiles of the first run, which starts where the span does
  int start;  // position where the second run starts
};

struct Visibility {
  int window, first;  // window 0: everything before the query

  int low(int position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
  // End of the kept-first tokens below `end`, at least `begin`.
  int kept_end(int begin, int end) const {
    return window > 0 ? greater(begin, lesser(first, end)) : begin;
  }

  // The tiles of span [begin, begin + kSpan) for queries at positions [from, to].
  template <class T>
  void tiles(const KVGeometry &kv, const int32_t *table, int layer, int head, int begin, int from,
             int to, Tiles<T> &out) const {
    const int end = lesser(begin + kSpan, to + 1);
    const int low_start = greater(low(from), begin);
    const int kept = kept_end(begin, end);
    out.start = low_start - low_start % kTile;
    const int kept_stop = ceil_div(kept, kTile) * kTile;
    const bool meet = kept > begin && kept_stop >= out.start;
    if (meet) out.start = begin;
    out.kept = meet ? 0 : (kept_stop - begin) / kTile;
    out.count = 0;
    for (int p = begin; p < begin + out.kept * kTile; p += kTile)
      add(kv, table, layer, head, p, out);
    for (int p = out.start; p < end; p += kTile) add(kv, table, layer, head, p, out);
    if (out.count == 0) return;
    // What the kernels fetch ahead: V behind K, nothing new behind V.
    for (int i = 0; i < kAhead; i++) {
      out.k[out.count + i] = out.v[i < out.count ? i : 0];
      out.v[out.count + i] = out.v[0];
    }
  }

  // What the query at `position` sees of the span at `begin`.
  template <class T>
  Seen seen(int position, int begin, const Tiles<T> &list) const {
    const int end = lesser(begin + kSpan, position + 1);
    const int from = greater(low(position), begin);
    const int kept = kept_end(begin, end);
    const int base = list.kept * kTile - list.start;
    if (kept >= from) return {{{0, 0}, {begin + base, end + base}}};
    const int kept_base = list.kept > 0 ? -begin : base;
    return {{{begin + kept_base, kept + kept_base}, {from + base, end + base}}};
  }

 private:
  template <class T>
  static void add(const KVGeometry &kv, const int32_t *table, int layer, int head, int position,
                  Tiles<T> &out) {
    const int token = position % kv.block_size;
    uint8_t *at = head_at(kv, table[position / kv.block_size], layer, head);
    const size_t values = static_cast<size_t>(token) * kv.head_dim;
    const int i = out.count++;
    out.k[i] = reinterpret_cast<const T *>(at) + values;
    out.v[i] = reinterpret_cast<const T *>(at + value_offset(kv)) + values;
    if (sizeof(T) == 1) {
      out.k_scale[i] = scales_at(kv, at) + token;
      out.v_scale[i] = out.k_scale[i] + kv.block_size;
    }
  }
};

// Of one query: maximum (base 2) and sum of the weights; its output lies elsewhere.
struct Total {
  float max, sum;
};

// The softmax of one query's scores in place, over tiles [begin, end) of the list; keys that it
// does not see get weight 0. cap: softcap in base 2, or 0. The weights come out times V's scales.
template <class T>
Total softmax(float *scores, const Tiles<T> &list, int begin, int end, const Seen &seen,
              float cap) {
  if (sizeof(T) == 1 || cap > 0) {
    for (int t = begin; t < end; t++)
      for (int v = 0; v < kTile; v += W) {
        F s = load(scores + t * kTile + v);
        if (sizeof(T) == 1) s = s * load(list.k_scale[t] + v);
        if (cap > 0) s = tanh(s) * set(cap);
        store(scores + t * kTile + v, s);
      }
  }
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  int key = begin * kTile;
  for (const Range &part : seen.part) {
    if (part.empty()) continue;
    for (; key < part.begin; key++) scores[key] = minus_infinity;
    key = part.end;
  }
  for (; key < end * kTile; key++) scores[key] = minus_infinity;

  F top = set(minus_infinity);
  for (int j = begin * kTile; j < end * kTile; j += W) top = max(top, load(scores + j));
  const float largest = reduce_max(top);
  const F shift = set(largest);
  F sum[kTileVectors];
  for (int v = 0; v < kTileVectors; v++) sum[v] = zero();
  for (int t = begin; t < end; t++)
    for (int v = 0; v < kTileVectors; v++) {
      float *at = scores + t * kTile + v * W;
      const F weight = exp2_negative(load(at) - shift);
      sum[v] = sum[v] + weight;
      store(at, sizeof(T) == 1 ? weight * load(list.v_scale[t] + v * W) : weight);
    }
  for (int v = 1; v < kTileVectors; v++) sum[0] = sum[0] + sum[v];
  return {largest, reduce_add(sum[0])};
}

// Adds the next span to what was merged before. dim is a multiple of 16.
HR_INLINE void merge(Total &total, float *out, const Total &next, const float *next_out, int dim) {
  const float top = total.max > next.max ? total.max : next.max;
  alignas(64) float factors[2 * W];
  store(factors, exp2_negative(set(total.max - top)));
  store(factors + W, exp2_negative(set(next.max - top)));
  const F a = set(factors[0]), b = set(factors[W]);
  total.max = top;
  total.sum = total.sum * factors[0] + next.sum * factors[W];
  for (int c = 0; c < dim; c += W)
    store(out + c, fma(load(next_out + c), b, load(out + c) * a));
}

// Divides by the sum, after a learned sink (base 2) joined it where there is one.
HR_INLINE void finish(Total total, const float *sink, const float *merged, float *out, int dim) {
  F scale = set(1.0f);
  if (sink) {
    const float top = total.max > *sink ? total.max : *sink;
    alignas(64) float factors[2 * W];
    scale = exp2_negative(set(total.max - top));
    store(factors, scale);
    store(factors + W, exp2_negative(set(*sink - top)));
    total.sum = total.sum * factors[0] + factors[W];
  }
  scale = scale / set(total.sum);
  int c = 0;
  for (; c + W <= dim; c += W) store(out + c, load(merged + c) * scale);
  if (c < dim) store_part(out + c, load(merged + c) * scale, dim - c);
}

}  // namespace HR_LEVEL
}  // namespace hr
