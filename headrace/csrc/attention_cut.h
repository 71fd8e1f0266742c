// How the attention of a step is cut into pieces. No cut changes a bit (see attention_span.h).
//
// A piece is some queries of one slice and kv head over all spans of keys. Where a slice with few
// queries has much of a step's work, each of its spans is a piece, and a second instruction merges
// them. Where many slices decode, neighbours with a common prefix form one piece.
#pragma once
#include "attention_span.h"

namespace hr {
namespace HR_LEVEL {
namespace {

constexpr int kGroups = 8;  // register tiles of queries in a piece, at most
constexpr int kMostQueries = kQueries * kGroups;
constexpr int kSplitQueries = 16;  // queries of a slice that may be split, at most
constexpr int kBalanced = 8;  // equal pieces a thread that balance well
constexpr int kMany = 64;  // (slice, kv head) pairs a thread from where on heads go together

// The spans that a slice sees, numbered without those between its kept-first tokens and its window.
struct Spans {
  int32_t kept, gap;  // spans that hold kept-first tokens; spans left out behind them
  int32_t begin_of(int32_t span) const { return (span < kept ? span : span + gap) * kSpan; }
};

// One piece: queries [begin, end) of a slice, or all of slices [slice, slice_end); kv heads [head,
// head_end), spans [span, span_end). partial >= 0: index of its first partial result.
struct Place {
  int32_t slice, slice_end, begin, end, head, head_end, span, span_end;
  int64_t partial;
  Spans spans;
  int32_t begin_of(int32_t number) const { return spans.begin_of(number); }
};

HR_INLINE int32_t padded_dim(const AttentionArgs &args) {
  return ceil_div(args.kv.head_dim, kTile) * kTile;
}

// Floats of one partial: maximum, sum, from kTile on the output.
HR_INLINE int64_t partial_floats(const AttentionArgs &args) { return padded_dim(args) + kTile; }

// Partials that the shared memory holds: those of the longest slices that one step can split.
HR_INLINE int64_t partial_count(const AttentionArgs &args) {
  if (args.threads < 2) return 0;
  int64_t seen = args.max_positions;
  if (args.window > 0) {
    const int64_t most = int64_t{args.window} + args.first + kSplitQueries + 3 * kSpan;
    seen = most < seen ? most : seen;
  }
  const int64_t spans = (seen + kSpan - 1) / kSpan;
  const int64_t wanted = int64_t{kBalanced} * args.threads * kSplitQueries * spans;
  const int64_t cap = (int64_t{32} << 20) / (4 * partial_floats(args));
  return wanted < cap ? wanted : cap;
}

// The same answers on every thread.
class Cut {
 public:
  explicit Cut(const AttentionArgs &args)
      : a_(args), partials_(partial_count(args)), group_(args.heads / args.kv.kv_heads) {}

  int32_t group() const { return group_; }

  // Number of pieces. `found`, if not null, gets the place of piece `wanted`.
  int32_t pieces(const Step &step, int32_t wanted, Place *found) const {
    const Survey all = survey(step);
    const int32_t heads = all.fold ? 1 : a_.kv.kv_heads;
    int32_t count = 0;
    int64_t used = 0;
    for (int32_t slice = 0; slice < step.slices;) {
      const Extent e = extent(step, slice);
      const bool split = splits(e, all, used);
      const int32_t together = split ? 1 : neighbours(step, slice, e, all, used);
      const int32_t tile = split || together > 1 ? e.queries : tile_queries(e);
      const int32_t tiles = ceil_div(e.queries, tile);
      const int32_t parts = split ? e.count : 1;
      const int32_t here = tiles * parts * heads;
      if (found && wanted < count + here) {
        const int32_t i = wanted - count, t = i % tiles, head = i / tiles % heads;
        const int32_t part = i / (tiles * heads);
        const int32_t end = together > 1 ? together * e.queries : lesser(e.queries, (t + 1) * tile);
        int32_t last = e.count;
        for (int32_t k = 1; k < together; k++)
          last = greater(last, extent(step, slice + k).count);
        const int32_t head_end = all.fold ? a_.kv.kv_heads : head + 1;
        *found = {slice, slice + together, t * tile, end, head, head_end,
                  split ? part : 0, split ? part + 1 : last,
                  split ? used + (int64_t{head} * parts + part) * e.queries : -1, e.spans};
        return count;
      }
      count += here;
      if (split) used += partials(e);
      slice += together;
    }
    return count;
  }

  // Split slices times kv heads. `found` gets slice and head of `wanted`, all its spans and its
  // first partial.
  int32_t merges(const Step &step, int32_t wanted, Place *found) const {
    const Survey all = survey(step);
    if (all.fold) return 0;
    const int32_t heads = a_.kv.kv_heads;
    int32_t count = 0;
    int64_t used = 0;
    for (int32_t slice = 0; slice < step.slices; slice++) {
      const Extent e = extent(step, slice);
      if (!splits(e, all, used)) continue;
      if (found && wanted < count + heads) {
        const int32_t head = wanted - count;
        *found = {slice, slice + 1, 0, e.queries, head, head + 1, 0, e.count,
                  used + int64_t{head} * e.count * e.queries, e.spans};
        return count;
      }
      count += heads;
      used += partials(e);
    }
    return count;
  }

 private:
  struct Extent {
    int32_t queries, context, count;  // count: spans
    Spans spans;
    int64_t work() const { return int64_t{queries} * count; }
  };

  // fold: a piece takes all kv heads of its slices. together: slices in a piece, at most. work: of
  // all slices, for one head.
  struct Survey {
    bool fold;
    int32_t together;
    int64_t work;
  };

  Survey survey(const Step &step) const {
    const int64_t pairs = int64_t{step.slices} * a_.kv.kv_heads;
    const bool fold = pairs >= int64_t{kMany} * a_.threads;
    const int64_t units = fold ? step.slices : pairs;
    const int64_t room = kMostQueries / group_, fair = units / (kBalanced * a_.threads);
    Survey out{fold, static_cast<int32_t>(fair < room ? fair : room), 0};
    if (a_.threads > 1 && !fold)
      for (int32_t slice = 0; slice < step.slices; slice++) out.work += extent(step, slice).work();
    return out;
  }

  Extent extent(const Step &step, int32_t slice) const {
    const int32_t *row = step.batch->slice_row + slice;
    const int32_t from = step.batch->position[row[0]], rows = row[1] - row[0];
    const Visibility see{a_.window, a_.first};
    const int32_t low = see.low(from) / kSpan;
    const int32_t kept = lesser(ceil_div(a_.first, kSpan), low);
    const int32_t gap = low - kept;
    return {rows * group_, from + rows, (from + rows - 1) / kSpan + 1 - gap, {kept, gap}};
  }

  int64_t partials(const Extent &e) const { return e.work() * a_.kv.kv_heads; }

  // Whether one head of the slice is more than its share of the step.
  bool splits(const Extent &e, const Survey &all, int64_t used) const {
    return a_.threads > 1 && !all.fold && e.queries <= kSplitQueries && e.count > 1 &&
           e.work() * kBalanced * a_.threads > all.work * a_.kv.kv_heads &&
           used + partials(e) <= partials_;
  }

  // How many slices from this one on, single rows each, begin with the pages of this one's first
  // span.
  int32_t neighbours(const Step &step, int32_t slice, const Extent &e, const Survey &all,
                     int64_t used) const {
    if (all.together < 2 || a_.window > 0 || e.queries != group_ || e.context <= kSpan) return 1;
    const Batch &batch = *step.batch;
    const int32_t *own = page_table(batch, batch.slice_slot[slice], a_.table_row);
    const int32_t last = (kSpan - 1) / a_.kv.block_size;
    int32_t count = 1;
    for (; count < all.together && slice + count < step.slices; count++) {
      const Extent next = extent(step, slice + count);
      const int32_t *its = page_table(batch, batch.slice_slot[slice + count], a_.table_row);
      if (next.queries != group_ || next.context <= kSpan || its[0] != own[0] ||
          its[last] != own[last] || splits(next, all, used))
        break;
    }
    return count;
  }

  // Queries of a piece: some 100 us of work, whole register tiles.
  int32_t tile_queries(const Extent &e) const {
    const int64_t tile_work = int64_t{kQueries} * e.context * a_.kv.head_dim;
    const int64_t tiles = (1 << 21) / (tile_work + 1);
    return kQueries * static_cast<int32_t>(tiles < 2 ? 2 : tiles > kGroups ? kGroups : tiles);
  }

  const AttentionArgs &a_;
  int64_t partials_;
  int32_t group_;
};

}  // namespace
}  // namespace HR_LEVEL
}  // namespace hr
