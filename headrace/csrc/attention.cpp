// Attention of spec.py over paged KV: runs the pieces that attention_cut.h lays out.
//
// The queries of one slice and kv head (rows x heads of its group, so that they share each read of
// K and V) are numbered q = row * group + head. Sequences whose pages are the same for a span (a
// shared prefix) share its reads too.
#include "attention_cut.h"

namespace hr {
namespace HR_LEVEL {
namespace {

template <class T>
class Attend final : public Instruction {
 public:
  explicit Attend(const AttentionArgs &args)
      : a_(args), cut_(a_), dim_(padded_dim(args)) {
    op = "attention";
    path = a_.kv.head_dim % 8 == 0 ? HR_LEVEL_NAME : HR_LEVEL_NAME ".generic";
  }

  int32_t pieces(const Step &step) const override { return cut_.pieces(step, 0, nullptr); }

  size_t scratch_bytes() const override {
    const size_t queries = kMostQueries;
    return sizeof(float) * queries * ((a_.has_near ? 3 : 2) * a_.kv.head_dim + dim_) +
           sizeof(float) * kQueries * ((a_.has_near ? 2 : 1) * kScoreStride + dim_) +
           queries * (sizeof(Total) + sizeof(int32_t));
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
  // Room in the scratch of a thread, by index of the query in the piece.
  struct Room {
    float *out, *span_out, *scores;
    // Queries times scale, each register tile transposed: tiles of each slice by itself, and tiles
    // of all queries in a row where there are several slices.
    float *packed, *dense;
    Total *total;
    int32_t *position;
    float *near, *near_scores;  // as packed and scores, of the second query
  };

  // One slice of a piece: its queries [begin, begin + count), which are the piece's from `index`
  // on.
  struct Member {
    const int32_t *table;
    int32_t row, begin, count, index, from, to;
  };

  Room rooms(Scratch &scratch) const {
    Room r;
    r.out = reinterpret_cast<float *>(scratch.data);
    r.span_out = r.out + kMostQueries * dim_;
    r.scores = r.span_out + kQueries * dim_;
    r.packed = r.scores + kQueries * kScoreStride;
    r.dense = r.packed + kMostQueries * a_.kv.head_dim;
    r.total = reinterpret_cast<Total *>(r.dense + kMostQueries * a_.kv.head_dim);
    r.position = reinterpret_cast<int32_t *>(r.total + kMostQueries);
    r.near = reinterpret_cast<float *>(r.position + kMostQueries);
    r.near_scores = r.near + kMostQueries * a_.kv.head_dim;
    return r;
  }

  // The slices of a piece. Returns how many.
  int32_t members(const Step &step, const Place &at, Member *out) const {
    const Batch &batch = *step.batch;
    const int32_t group = cut_.group();
    int32_t index = 0;
    for (int32_t slice = at.slice; slice < at.slice_end; slice++) {
      const int32_t row = batch.slice_row[slice], rows = batch.slice_row[slice + 1] - row;
      const bool whole = at.slice_end - at.slice > 1;
      const int32_t begin = whole ? 0 : at.begin, end = whole ? rows * group : at.end;
      const int32_t first = batch.position[row];
      *out++ = {page_table(batch, batch.slice_slot[slice], a_.table_row), row, begin, end - begin,
                index, first + begin / group, first + (end - 1) / group};
      index += end - begin;
    }
    return at.slice_end - at.slice;
  }

  void attend(const Step &step, const Place &at, int32_t head, Scratch &scratch) const {
    const Room room = rooms(scratch);
    Member member[kMostQueries];
    const int32_t count = members(step, at, member), queries = at.end - at.begin;
    int32_t furthest = 0, nearest = member[0].to;
    for (int32_t i = 0; i < count; i++) {
      const Member &m = member[i];
      for (int32_t q = 0; q < m.count; q++)
        room.position[m.index + q] = m.from + (m.begin + q) / cut_.group() - m.begin / cut_.group();
      for (int32_t q = 0; q < m.count; q += kQueries) {
        const int32_t here = lesser(kQueries, m.count - q), at = (m.index + q) * a_.kv.head_dim;
        pack(a_.q, m, m.begin + q, here, head, room.packed + at);
        if (a_.near) pack(a_.near, m, m.begin + q, here, head, room.near + at);
      }
      furthest = greater(furthest, m.to);
      nearest = lesser(nearest, m.to);
    }
    if (count > 1)
      for (int32_t q = 0; q < queries; q += kQueries)
        pack_dense(member, q, lesser(kQueries, queries - q), head,
                   room.dense + q * a_.kv.head_dim);
    for (int32_t q = 0; q < queries; q++) room.total[q].sum = -1.0f;  // nothing merged yet

    for (int32_t span = at.span; span < at.span_end; span++) {
      const int32_t begin = at.begin_of(span);
      if (begin > furthest) break;
      if (count > 1 && begin + kSpan <= nearest + 1 && same_pages(member, count, begin)) {
        attend_member(member[0], begin, head, nearest, 0, queries, room.dense, room);
        continue;
      }
      for (int32_t i = 0; i < count; i++) {
        const Member &m = member[i];
        if (begin > m.to) continue;
        attend_member(m, begin, head, m.to, m.index, m.count, room.packed, room);
      }
    }
    if (at.partial >= 0) {
      keep_partials(at, room);
    } else {
      for (int32_t i = 0; i < count; i++) write(member[i], head, room);
    }
  }

  // Whether all members have the same pages for the span.
  bool same_pages(const Member *member, int32_t count, int32_t begin) const {
    const int32_t block = begin / a_.kv.block_size;
    const size_t blocks = (begin + kSpan - 1) / a_.kv.block_size - block + 1;
    for (int32_t i = 1; i < count; i++)
      if (std::memcmp(member[i].table + block, member[0].table + block, blocks * sizeof(int32_t)))
        return false;
    return true;
  }

  const float *query(const float *queries, const Member &m, int32_t q, int32_t head) const {
    const int32_t group = cut_.group();
    const size_t row = m.row + q / group;
    return queries + (row * a_.heads + head * group + q % group) * a_.kv.head_dim;
  }

  float query_scale() const {
    return a_.softcap > 0 ? a_.scale / a_.softcap : a_.scale * kLog2E;
  }

  // One register tile of a slice's queries.
  void pack(const float *queries, const Member &m, int32_t first, int32_t count, int32_t head,
            float *out) const {
    const float scale = query_scale();
    for (int32_t i = 0; i < count; i++) {
      const float *from = query(queries, m, first + i, head);
      for (int32_t d = 0; d < a_.kv.head_dim; d++) out[d * count + i] = from[d] * scale;
    }
  }

  // One register tile of the piece's queries, whatever slices they come from.
  void pack_dense(const Member *m, int32_t first, int32_t count, int32_t head, float *out) const {
    const float scale = query_scale();
    for (int32_t i = 0; i < count; i++) {
      while (first + i >= m->index + m->count) m++;
      const float *from = query(a_.q, *m, first + i - m->index, head);
      for (int32_t d = 0; d < a_.kv.head_dim; d++) out[d * count + i] = from[d] * scale;
    }
  }

  // Adds one span, by the pages of `m` up to position `to`, to queries [index, index + count) of
  // the piece, which lie in `packed` by index.
  void attend_member(const Member &m, int32_t begin, int32_t head, int32_t to, int32_t index,
                     int32_t count, const float *packed, const Room &room) const {
    const Visibility see{a_.window, a_.first};
    Tiles<T> tiles;
    see.tiles(a_.kv, m.table, a_.layer_in_page, head, begin, m.from, to, tiles);
    if (tiles.count == 0) return;
    for (int32_t q = index; q < index + count; q += kQueries)
      attend_span(tiles, begin, q, lesser(kQueries, index + count - q),
                  packed + q * a_.kv.head_dim, room);
  }

  // Adds one span to `count` queries of the piece, a register tile.
  void attend_span(const Tiles<T> &tiles, int32_t begin, int32_t index, int32_t count,
                   const float *packed, const Room &room) const {
    static constexpr Kernels<T> kernels =
        all_kernels<T>(std::make_integer_sequence<int, kQueries>());
    const Visibility see{a_.window, a_.first};
    Seen seen[kQueries];
    int32_t low = kSpan, high = 0;
    for (int32_t i = 0; i < count; i++) {
      seen[i] = see.seen(room.position[index + i], begin, tiles);
      for (const Range &part : seen[i].part) {
        if (part.empty()) continue;
        low = lesser(low, part.begin / kTile);
        high = greater(high, ceil_div(part.end, kTile));
      }
    }
    if (low >= high) return;
    const int32_t dim = a_.kv.head_dim;
    kernels.score[count - 1](packed, dim, tiles.k + low, high - low, room.scores + low * kTile);
    if (a_.near) score_kept(kernels, tiles, begin, index, count, low, high, room);
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

  // The scores of the span's kept-first tokens, which lead the list of tiles, by the second query.
  void score_kept(const Kernels<T> &kernels, const Tiles<T> &tiles, int32_t begin, int32_t index,
                  int32_t count, int32_t low, int32_t high, const Room &room) const {
    const int32_t kept = lesser(a_.first - begin, high * kTile), from = low * kTile;
    if (kept <= from) return;
    const int32_t dim = a_.kv.head_dim;
    kernels.score[count - 1](room.near + index * dim, dim, tiles.k + low,
                             ceil_div(kept, kTile) - low, room.near_scores + from);
    for (int32_t i = 0; i < count; i++)
      std::memcpy(room.scores + i * kScoreStride + from,
                  room.near_scores + i * kScoreStride + from, sizeof(float) * (kept - from));
  }

  // V times the weights of keys that all queries see, together; of the others, query by query: a
  // key that a row does not see must not reach it, not even times zero.
  void weigh_part(const Kernels<T> &kernels, const Tiles<T> &tiles, const Seen *seen, int part,
                  int32_t count, const Room &room) const {
    const int32_t dim = a_.kv.head_dim;
    Range common = seen[0].part[part];
    for (int32_t i = 1; i < count; i++) {
      common.begin = greater(common.begin, seen[i].part[part].begin);
      common.end = lesser(common.end, seen[i].part[part].end);
    }
    const auto alone = [&](int32_t i, int begin, int end) {
      if (begin < end)
        kernels.weigh[0](room.scores + i * kScoreStride, tiles.v, dim, begin, end,
                         room.span_out + i * dim_, dim_);
    };
    if (common.empty()) {
      for (int32_t i = 0; i < count; i++)
        alone(i, seen[i].part[part].begin, seen[i].part[part].end);
      return;
    }
    for (int32_t i = 0; i < count; i++) alone(i, seen[i].part[part].begin, common.begin);
    kernels.weigh[count - 1](room.scores, tiles.v, dim, common.begin, common.end, room.span_out,
                             dim_);
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

  void write(const Member &m, int32_t head, const Room &room) const {
    const int32_t group = cut_.group(), dim = a_.kv.head_dim;
    for (int32_t i = 0; i < m.count; i++) {
      const int32_t q = m.begin + i, h = head * group + q % group;
      const float sink = a_.sinks ? a_.sinks[h] * kLog2E : 0.0f;
      finish(room.total[m.index + i], a_.sinks ? &sink : nullptr,
             room.out + static_cast<size_t>(m.index + i) * dim_,
             a_.out + (static_cast<size_t>(m.row + q / group) * a_.heads + h) * dim, dim);
    }
  }

  AttentionArgs a_;
  Cut cut_;
  int32_t dim_;
};

class MergeSpans final : public Instruction {
 public:
  explicit MergeSpans(const AttentionArgs &args)
      : a_(args), cut_(a_), dim_(padded_dim(args)) {
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
