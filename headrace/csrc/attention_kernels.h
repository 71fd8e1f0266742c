// The inner loops of attention: Q queries against tiles of keys, and their weights against V.
//
// Both are chains of fused multiply-adds, one accumulator for each result, in the order of head_dim
// (scores) and of the keys (output). How many queries, tiles or columns go together is a matter of
// registers and never changes a bit.
#pragma once
#include <utility>

#include "pages.h"

namespace hr {
namespace HR_LEVEL {

constexpr int kSpan = 256;              // keys of a span, at absolute positions
constexpr int kSpanTiles = kSpan / kTile;
constexpr int kTileVectors = kTile / W;
constexpr int kScoreStride = kSpan + 16;  // between the scores of two queries; not a power of two

// Accumulators that fit the register file, and the queries that go together at most.
#if defined(HR_LEVEL_AVX512)
constexpr int kAccumulators = 24, kQueries = 12;
#elif defined(HR_LEVEL_AVX2)
constexpr int kAccumulators = 12, kQueries = 6;
#else
constexpr int kAccumulators = 3, kQueries = 3;
#endif

constexpr int together(int queries, int vectors) {
  int count = 8;
  while (count > 1 && queries * vectors * count > kAccumulators) count /= 2;
  return count;
}

// Tiles ahead of the one in use that few queries ask of the memory; many queries wait for
// arithmetic. Lists of tiles go on for as many entries, whatever these point to.
constexpr int kAhead = 8;
constexpr bool fetches(int queries) { return 2 * queries <= kQueries; }

// sum[i][v] += x(i) * y(v). The shorter side is held in registers, the longer one passes through.
template <int Q, int V, class X, class Y>
HR_INLINE void accumulate(F (&sum)[Q][V], const X &x, const Y &y) {
  if (Q <= V) {
    F held[Q];
    for (int i = 0; i < Q; i++) held[i] = x(i);
    for (int v = 0; v < V; v++) {
      const F passing = y(v);
      for (int i = 0; i < Q; i++) sum[i][v] = fma(held[i], passing, sum[i][v]);
    }
  } else {
    F held[V];
    for (int v = 0; v < V; v++) held[v] = y(v);
    for (int i = 0; i < Q; i++) {
      const F passing = x(i);
      for (int v = 0; v < V; v++) sum[i][v] = fma(passing, held[v], sum[i][v]);
    }
  }
}

template <int Q, int N, class T>
HR_INLINE void score_some(const float *q, int dim, const T *const *tiles, float *scores) {
  constexpr int V = N * kTileVectors;
  F sum[Q][V];
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < V; v++) sum[i][v] = zero();
  for (int d = 0; d < dim; d++) {
    const auto key = [&](int v) {
      return load(tiles[v / kTileVectors] + d * kTile + v % kTileVectors * W);
    };
    if (fetches(Q))
      for (int n = 0; n < N; n++) __builtin_prefetch(tiles[N + n] + d * kTile);
    accumulate<Q, V>(sum, [&](int i) { return set(q[d * Q + i]); }, key);
  }
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < V; v++) store(scores + i * kScoreStride + v * W, sum[i][v]);
}

// scores[i * kScoreStride + 16 t + lane] = q[i] . k of lane `lane` of tile t. q: [dim][Q].
template <int Q, class T>
void score(const float *q, int dim, const T *const *tiles, int count, float *scores) {
  constexpr int N = together(Q, kTileVectors);
  int t = 0;
  for (; t + N <= count; t += N) score_some<Q, N>(q, dim, tiles + t, scores + t * kTile);
  if (N == 1) return;
  for (; t < count; t++) score_some<Q, 1>(q, dim, tiles + t, scores + t * kTile);
}

template <int Q, int N, class T>
HR_INLINE void weigh_columns(const float *weights, const T *const *tiles, int dim, int begin,
                             int end, int column, float *out, int stride) {
  F sum[Q][N];
  for (int i = 0; i < Q; i++)
    for (int c = 0; c < N; c++) sum[i][c] = load(out + i * stride + column + c * W);
  for (int j = begin; j < end;) {
    const T *v = tiles[j / kTile] + (j % kTile) * dim + column;
    const int stop = (j / kTile + 1) * kTile < end ? (j / kTile + 1) * kTile : end;
    const T *next = tiles[j / kTile + 2] + (j % kTile) * dim + column;
    for (; j < stop; j++, v += dim, next += dim) {
      if (fetches(Q)) __builtin_prefetch(next);
      accumulate<Q, N>(sum, [&](int i) { return set(weights[i * kScoreStride + j]); },
                       [&](int c) { return load(v + c * W); });
    }
  }
  for (int i = 0; i < Q; i++)
    for (int c = 0; c < N; c++) store(out + i * stride + column + c * W, sum[i][c]);
}

// The columns behind the last whole vector.
template <int Q, class T>
void weigh_rest(const float *weights, const T *const *tiles, int dim, int begin, int end,
                int column, float *out, int stride) {
  for (int j = begin; j < end; j++) {
    const F x = load_part(tiles[j / kTile] + (j % kTile) * dim + column, dim - column);
    for (int i = 0; i < Q; i++) {
      float *to = out + i * stride + column;
      store(to, fma(set(weights[i * kScoreStride + j]), x, load(to)));
    }
  }
}

// out[i * stride + c] += sum over keys j in [begin, end) of weights[i * kScoreStride + j] *
// v[j][c]. stride is a multiple of 16 and at least dim.
template <int Q, class T>
void weigh(const float *weights, const T *const *tiles, int dim, int begin, int end, float *out,
           int stride) {
  constexpr int N = together(Q, 1), kKeys = 4 * kTile;  // keys whose V stays in the first cache
  for (int j = begin; j < end;) {
    const int stop = (j / kKeys + 1) * kKeys < end ? (j / kKeys + 1) * kKeys : end;
    int column = 0;
    for (; column + N * W <= dim; column += N * W)
      weigh_columns<Q, N>(weights, tiles, dim, j, stop, column, out, stride);
    if (N > 2)
      for (; column + 2 * W <= dim; column += 2 * W)
        weigh_columns<Q, 2>(weights, tiles, dim, j, stop, column, out, stride);
    for (; column + W <= dim; column += W)
      weigh_columns<Q, 1>(weights, tiles, dim, j, stop, column, out, stride);
    if (column < dim) weigh_rest<Q>(weights, tiles, dim, j, stop, column, out, stride);
    j = stop;
  }
}

// The kernels by number of queries, 1 to kQueries.
template <class T>
struct Kernels {
  using Score = void (*)(const float *, int, const T *const *, int, float *);
  using Weigh = void (*)(const float *, const T *const *, int, int, int, float *, int);
  Score score[kQueries];
  Weigh weigh[kQueries];
};

template <class T, int... Q>
constexpr Kernels<T> all_kernels(std::integer_sequence<int, Q...>) {
  return {{score<Q + 1, T>...}, {weigh<Q + 1, T>...}};
}

}  // namespace HR_LEVEL
}  // namespace hr
