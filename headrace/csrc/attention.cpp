// Attention of spec.py over paged KV.
//
// The queries of one slice and kv head (rows x heads of its group, so that they share each read of K
// and V) are numbered q = row * group + head. A piece is some queries of one kv head over all spans of
// keys; where a step has few of those, a piece is one span of them, and a second instruction merges
// the spans. Which of the two never changes a bit (see attention_span.h).
#include "attention_span.h"

namespace hr {
namespace HR_LEVEL {
namespace {

constexpr int kGroups = 8;        // register tiles of queries in a piece, at most
constexpr int kSplitQueries = 16; // queries of a slice whose spans may become pieces
constexpr int kEnough = 16;       // pieces a thread that balance well without splitting

HR_INLINE int32_t round_up(int32_t value, int32_t to) { return (value + to - 1) / to * to; }

// One piece: queries [begin, end) of a slice, kv heads [head, head_end), spans [span, span_end).
// partial >= 0: index of its first partial result.
struct Place {
  int32_t slice, begin, end, head, head_end, span, span_end;
  int64_t partial;
};

// How a step is cut into pieces; the same answer on every thread.
class Cut {
 public:
  Cut(const AttentionArgs &args, int64_t partials) : a_(args), partials_(partials) {
    group_ = a_.heads / a_.kv.kv_heads;
  }

  int32_t group() const { return group_; }

  // Number of pieces. `found`, if not null, gets the place of piece `wanted`.
  int32_t pieces(const Step &step, int32_t wanted, Place *found) const {
    const int32_t heads = a_.kv.kv_heads;
    const int64_t least = static_cast<int64_t>(step.slices) * heads;
    const bool fold = least >= 4 * kEnough * a_.threads;
    const bool split = a_.threads > 1 && least < kEnough * a_.threads;
    int32_t count = 0;
    int64_t used = 0;
    for (int32_t slice = 0; slice < step.slices; slice++) {
      const Extent e = extent(step, slice);
      const int64_t need = static_cast<int64_t>(e.queries) * heads * (e.span_end - e.span);
      const bool spans = split && splits(e) && used + need <= partials_;
      const int32_t tile = spans ? e.queries : tile_queries(e);
      const int32_t tiles = ceil_div(e.queries, tile);
      const int32_t parts = spans ? e.span_end - e.span : 1;
      const int32_t here = tiles * parts * (fold ? 1 : heads);
      if (found && wanted < count + here) {
        const int32_t i = wanted - count, t = i % tiles, head = fold ? 0 : i / tiles % heads;
        const int32_t part = i / (tiles * (fold ? 1 : heads));
        *found = {slice, t * tile, lesser(e.queries, (t + 1) * tile), head, fold ? heads : head + 1,
                  spans ? e.span + part : e.span, spans ? e.span + part + 1 : e.span_end,
                  spans ? used + (static_cast<int64_t>(head) * parts + part) * e.queries : -1};
        return count;
      }
      count += here;
      if (spans) used += need;
    }
    return count;
  }

  // Slices whose spans are pieces: how many, times kv heads. `found` gets (slice, head) of `wanted`,
  // its spans and its first partial.
  int32_t merges(const Step &step, int32_t wanted, Place *found) const {
    const int32_t heads = a_.kv.kv_heads;
    if (a_.threads < 2 || static_cast<int64_t>(step.slices) * heads >= kEnough * a_.threads) return 0;
    int32_t count = 0;
    int64_t used = 0;
    for (int32_t slice = 0; slice < step.slices; slice++) {
      const Extent e = extent(step, slice);
      const int64_t need = static_cast<int64_t>(e.queries) * heads * (e.span_end - e.span);
      if (!splits(e) || used + need > partials_) continue;
      if (found && wanted < count + heads) {
        const int32_t head = wanted - count;
        *found = {slice, 0, e.queries, head, head + 1, e.span, e.span_end,
                  used + static_cast<int64_t>(head) * (e.span_end - e.span) * e.queries};
        return count;
      }
      count += heads;
      used += need;
    }
    return count;
  }

 private:
  struct Extent {
    int32_t queries, context, span, span_end;
  };

  Extent extent(const Step &step, int32_t slice) const {
    const int32_t *row = step.batch->slice_row + slice;
    const int32_t from = step.batch->position[row[0]], rows = row[1] - row[0];
    const Visibility see{a_.window, a_.first};
    const int32_t span = a_.first > 0 ? 0 : see.low(from) / kSpan;
    return {rows * group_, from + rows, span, (from + rows - 1) / kSpan + 1};
  }

  bool splits(const Extent &e) const {
    return e.queries <= kSplitQueries && e.span_end - e.span > 1;
  }

  // Queries of a piece: some 100 us of work, whole register tiles.
  int32_t tile_queries(const Extent &e) const {
    const int64_t tile_work = static_cast<int64_t>(kQueries) * e.context * a_.kv.head_dim;
    const int64_t tiles = (1 << 21) / (tile_work + 1);
    return kQueries * static_cast<int32_t>(tiles < 2 ? 2 : tiles > kGroups ? kGroups : tiles);
  }

  const AttentionArgs &a_;
  int64_t partials_;
  int32_t group_;
};

int32_t padded_dim(const AttentionArgs &args) { return round_up(args.kv.head_dim, kTile); }

// Floats of one partial: output, maximum, sum.
int64_t partial_floats(const AttentionArgs &args) { return padded_dim(args) + kTile; }

// Partials that the shared memory holds: every kv head of the slices that may be split, all spans.
int64_t partial_count(const AttentionArgs &args) {
  if (args.threads < 2) return 0;
  const int64_t group = args.heads / args.kv.kv_heads;
  const int64_t spans = (static_cast<int64_t>(args.max_positions) + kSpan - 1) / kSpan;
  const int64_t wanted = kEnough * args.threads * greater(group, kSplitQueries) * spans;
  const int64_t cap = (int64_t{32} << 20) / (4 * partial_floats(args));
  return wanted < cap ? wanted : cap;
}

template <class T>
class Attend final : public Instruction {
 public:
  explicit Attend(const AttentionArgs &args)
      : a_(args), cut_(a_, partial_count(args)), dim_(padded_dim(args)) {
    op = "attention";
    path = a_.kv.head_dim % 8 == 0 ? HR_LEVEL_NAME : HR_LEVEL_NAME ".generic";
  }

  int32_t pieces(const Step &step) const override { return cut_.pieces(step, 0, nullptr); }

  size_t scratch_bytes() const override {
    const size_t queries = kQueries * kGroups + kSplitQueries;
    return 64 + sizeof(float) * (queries * (a_.kv.head_dim + dim_) + 2 * queries +
                                 kQueries * (kScoreStride + dim_));
  }

  void run(const Step &step, int32_t piece, Scratch &scratch) const override {
    Place at{};
    cut_.pieces(step, piece, &at);
    for (int32_t head = at.head; head < at.head_end; head++) attend(step, at, head, scratch);
  }

  double bytes(const Step &step) const override {
    double keys = 0;
    for (int32_t slice = 0; slice < step.slices; slice++)
      keys += step.batch->position[step.batch->slice_row[slice + 1] - 1] + 1;
    return keys * 2 * kv_item(a_.kv.type) * a_.kv.kv_heads * a_.kv.head_dim;
  }
  double flops(const Step &step) const override {
    double keys = 0;
    for (int32_t row = 0; row < step.tokens; row++) {
      const int32_t all = step.batch->position[row] + 1;
      keys += a_.window > 0 ? lesser(all, a_.window + a_.first) : all;
    }
    return keys * 4 * a_.heads * a_.kv.head_dim;
  }

 private:
  // Room in the scratch of a thread. packed: queries, [head_dim][register tile] each tile.
  struct Room {
    float *packed, *out, *scores, *span_out;
    Total *total;
  };

  void attend(const Step &step, const Place &at, int32_t head, Scratch &scratch) const {
    const int32_t queries = at.end - at.begin, group = cut_.group();
    Room room;
    room.out = reinterpret_cast<float *>(scratch.data);
    room.span_out = room.out + static_cast<size_t>(queries) * dim_;
    room.scores = room.span_out + kQueries * dim_;
    room.packed = room.scores + kQueries * kScoreStride;
    room.total = reinterpret_cast<Total *>(room.packed + static_cast<size_t>(queries) * a_.kv.head_dim);
    const int32_t *rows = step.batch->slice_row + at.slice;
    const int32_t row = rows[0], first_position = step.batch->position[row];
    pack(row, at, head, room.packed);
    for (int32_t q = 0; q < queries; q++) room.total[q].sum = -1.0f;  // nothing merged yet

    const int32_t *table = page_table(*step.batch, step.batch->slice_slot[at.slice], a_.table_row);
    const Visibility see{a_.window, a_.first};
    const int32_t from = first_position + at.begin / group;
    const int32_t to = first_position + (at.end - 1) / group;
    Tiles<T> tiles;
    for (int32_t span = at.span; span < at.span_end && span * kSpan <= to; span++) {
      see.tiles(a_.kv, table, a_.layer_in_page, head, span * kSpan, from, to, tiles);
      if (tiles.count == 0) continue;
      for (int32_t q = 0; q < queries; q += kQueries)
        attend_span(tiles, span * kSpan, at.begin + q, lesser(kQueries, queries - q), first_position,
                    q, room);
    }
    if (at.partial >= 0) {
      keep_partials(at, room);
    } else {
      write(row, at, head, room);
    }
  }

  // Queries times scale, each register tile transposed.
  void pack(int32_t row, const Place &at, int32_t head, float *packed) const {
    const int32_t dim = a_.kv.head_dim, group = cut_.group();
    const float scale = a_.softcap > 0 ? a_.scale / a_.softcap : a_.scale * kLog2E;
    for (int32_t begin = at.begin; begin < at.end; begin += kQueries) {
      const int32_t count = lesser(kQueries, at.end - begin);
      for (int32_t i = 0; i < count; i++) {
        const int32_t q = begin + i;
        const float *from =
            a_.q + (static_cast<size_t>(row + q / group) * a_.heads + head * group + q % group) * dim;
        for (int32_t d = 0; d < dim; d++) packed[d * count + i] = from[d] * scale;
      }
      packed += count * dim;
    }
  }

  // Adds one span to queries [first, first + count) of the slice, the `index`-th and on of the piece.
  void attend_span(const Tiles<T> &tiles, int32_t begin, int32_t first, int32_t count,
                   int32_t first_position, int32_t index, Room &room) const {
    static constexpr Kernels<T> kernels =
        all_kernels<T>(std::make_integer_sequence<int, kQueries>());
    const Visibility see{a_.window, a_.first};
    const int32_t group = cut_.group();
    Seen seen[kQueries];
    int32_t low = kSpan, high = 0;
    for (int32_t i = 0; i < count; i++) {
      seen[i] = see.seen(first_position + (first + i) / group, begin, tiles);
      for (const Range &part : seen[i].part) {
        if (part.empty()) continue;
        low = lesser(low, part.begin / kTile);
        high = greater(high, ceil_div(part.end, kTile));
      }
    }
    if (low >= high) return;
    const int32_t dim = a_.kv.head_dim;
    kernels.score[count - 1](room.packed + static_cast<size_t>(index) * dim, dim, tiles.k + low,
                             high - low, room.scores + low * kTile);
    Total total[kQueries];
    const float cap = a_.softcap > 0 ? a_.softcap * kLog2E : 0.0f;
    for (int32_t i = 0; i < count; i++)
      total[i] = softmax(room.scores + i * kScoreStride, tiles, low, high, seen[i], cap);
    std::memset(room.span_out, 0, sizeof(float) * count * dim_);
    for (int part = 0; part < 2; part++) weigh_part(kernels, tiles, seen, part, count, room);
    for (int32_t i = 0; i < count; i++) {
      if (seen[i].empty()) continue;
      Total &sum = room.total[index + i];
      float *out = room.out + static_cast<size_t>(index + i) * dim_;
      if (sum.sum < 0) {
        sum = total[i];
        std::memcpy(out, room.span_out + i * dim_, sizeof(float) * dim_);
      } else {
        merge(sum, out, total[i], room.span_out + i * dim_, dim_);
      }
    }
  }

  // V times the weights of keys that all queries see, together; of the others, query by query: a key
  // that a row does not see must not reach it, not even times zero.
  void weigh_part(const Kernels<T> &kernels, const Tiles<T> &tiles, const Seen *seen, int part,
                  int32_t count, Room &room) const {
    const int32_t dim = a_.kv.head_dim;
    Range common = seen[0].part[part];
    for (int32_t i = 1; i < count; i++) {
      common.begin = greater(common.begin, seen[i].part[part].begin);
      common.end = lesser(common.end, seen[i].part[part].end);
    }
    const auto alone = [&](int32_t i, int begin, int end) {
      if (begin < end)
        kernels.weigh[0](room.scores + i * kScoreStride, tiles.v, dim, begin, end, room.span_out + i * dim_,
                         dim_);
    };
    if (common.empty()) {
      for (int32_t i = 0; i < count; i++) alone(i, seen[i].part[part].begin, seen[i].part[part].end);
      return;
    }
    for (int32_t i = 0; i < count; i++) alone(i, seen[i].part[part].begin, common.begin);
    kernels.weigh[count - 1](room.scores, tiles.v, dim, common.begin, common.end, room.span_out, dim_);
    for (int32_t i = 0; i < count; i++) alone(i, common.end, seen[i].part[part].end);
  }

  void keep_partials(const Place &at, const Room &room) const {
    const int64_t size = partial_floats(a_);
    float *to = reinterpret_cast<float *>(a_.shared) + at.partial * size;
    for (int32_t q = 0; q < at.end - at.begin; q++, to += size) {
      to[0] = room.total[q].max;
      to[1] = room.total[q].sum;
      std::memcpy(to + kTile, room.out + static_cast<size_t>(q) * dim_, sizeof(float) * dim_);
    }
  }

  void write(int32_t row, const Place &at, int32_t head, const Room &room) const {
    const int32_t group = cut_.group(), dim = a_.kv.head_dim;
    for (int32_t q = at.begin; q < at.end; q++) {
      const int32_t h = head * group + q % group;
      const float sink = a_.sinks ? a_.sinks[h] * kLog2E : 0.0f;
      finish(room.total[q - at.begin], a_.sinks ? &sink : nullptr,
             room.out + static_cast<size_t>(q - at.begin) * dim_,
             a_.out + (static_cast<size_t>(row + q / group) * a_.heads + h) * dim, dim);
    }
  }

  AttentionArgs a_;
  Cut cut_;
  int32_t dim_;
};

class MergeSpans final : public Instruction {
 public:
  explicit MergeSpans(const AttentionArgs &args)
      : a_(args), cut_(a_, partial_count(args)), dim_(padded_dim(args)) {
    op = "attention_merge";
    path = HR_LEVEL_NAME;
  }

  int32_t pieces(const Step &step) const override { return cut_.merges(step, 0, nullptr); }

  void run(const Step &step, int32_t piece, Scratch &) const override {
    Place at{};
    cut_.merges(step, piece, &at);
    const int32_t group = cut_.group(), dim = a_.kv.head_dim;
    const int32_t row = step.batch->slice_row[at.slice];
    const int64_t size = partial_floats(a_), span_size = size * at.end;
    float *first = reinterpret_cast<float *>(a_.shared) + at.partial * size;
    for (int32_t q = 0; q < at.end; q++, first += size) {
      Total total{0.0f, -1.0f};
      float *merged = nullptr, *next = first;
      for (int32_t span = at.span; span < at.span_end; span++, next += span_size) {
        if (next[1] < 0) continue;  // the query sees nothing of that span
        if (!merged) {
          total = {next[0], next[1]};
          merged = next + kTile;
        } else {
          merge(total, merged, {next[0], next[1]}, next + kTile, dim_);
        }
      }
      const int32_t h = at.head * group + q % group;
      const float sink = a_.sinks ? a_.sinks[h] * kLog2E : 0.0f;
      finish(total, a_.sinks ? &sink : nullptr, merged,
             a_.out + (static_cast<size_t>(row + q / group) * a_.heads + h) * dim, dim);
    }
  }

 private:
  AttentionArgs a_;
  Cut cut_;
  int32_t dim_;
};

}  // namespace

size_t attention_shared_bytes(const AttentionArgs &args) {
  return static_cast<size_t>(partial_count(args) * partial_floats(args)) * sizeof(float);
}

std::vector<std::unique_ptr<Instruction>> make_attention(const AttentionArgs &args) {
  std::vector<std::unique_ptr<Instruction>> out;
  switch (args.kv.type) {
    case KVType::f16: out.emplace_back(new Attend<uint16_t>(args)); break;
    case KVType::f32: out.emplace_back(new Attend<float>(args)); break;
    case KVType::int8: out.emplace_back(new Attend<int8_t>(args)); break;
  }
  if (args.threads > 1) out.emplace_back(new MergeSpans(args));
  return out;
}

}  // namespace HR_LEVEL
}  // namespace hr
