// Sample of spec.py: one piece a sample point.
//
// Logits stay where they are unless a mask, a bias or a penalty changes them; then the thread's
// copy is used. Decisions are made in float64 on the few candidates that passed a float32 bound, so
// they are those of the reference but for the sum of the weights under top-p, which float32
// exponentials form.
#include "noise.h"
#include "sample_row.h"

namespace hr {
namespace HR_LEVEL {
namespace {

class Sample final : public Instruction {
 public:
  explicit Sample(const SampleArgs &args) : a_(args) {
    op = "sample";
    path = HR_LEVEL_NAME;
  }

  int32_t pieces(const Step &step) const override { return step.samples; }

  size_t scratch_bytes() const override {
    const size_t cells = cell_bytes();
    return 2 * cells + copy_bytes() + sizeof(Candidate) * (a_.vocabulary + W);
  }

  void run(const Step &step, int32_t i, Scratch &scratch) const override {
    const Batch &batch = *step.batch;
    Room room(*this, scratch);
    Row raw{a_.logits + static_cast<size_t>(batch.sample_row[i]) * a_.stride, a_.vocabulary,
            room.cells, 0};
    const bool report_it = batch.top_logprobs[i] >= 0;
    int32_t token = batch.forced[i];
    if (token < 0) {
      Row row = raw;
      if (changes(batch, i)) row.x = processed(raw.x, batch, i, room.copy);
      row.scan();
      token = choose(row, batch, i, room);
      raw.top = row.top;
      if (report_it && row.x != raw.x) raw.scan();
    } else if (report_it) {
      raw.scan();
    }
    batch.out_token[i] = token;
    if (report_it) report(raw, token, batch, i, room);
  }

  double bytes(const Step &step) const override { return 4.0 * step.samples * a_.vocabulary; }

 private:
  size_t cell_bytes() const {
    return sizeof(float) * W * (ceil_div(a_.vocabulary, kBlockValues) + 1);
  }
  size_t copy_bytes() const { return sizeof(float) * (ceil_div(a_.vocabulary, 32) * 32 + W); }

  struct Room {
    Room(const Sample &sample, Scratch &scratch) {
      uint8_t *at = scratch.data;
      cells = reinterpret_cast<float *>(at);
      spare = reinterpret_cast<float *>(at += sample.cell_bytes());
      copy = reinterpret_cast<float *>(at += sample.cell_bytes());
      list = reinterpret_cast<Candidate *>(at += sample.copy_bytes());
    }
    float *cells, *spare, *copy;
    Candidate *list;
  };

  static bool changes(const Batch &batch, int32_t i) {
    return batch.mask_index[i] >= 0 || batch.bias_start[i + 1] > batch.bias_start[i] ||
           batch.penalty_start[i + 1] > batch.penalty_start[i];
  }

  // A copy of the logits after mask, bias and penalties.
  const float *processed(const float *x, const Batch &batch, int32_t i, float *out) const {
    const int32_t count = a_.vocabulary;
    if (batch.mask_index[i] >= 0) {
      const uint32_t *words =
          batch.masks + static_cast<size_t>(batch.mask_index[i]) * batch.mask_words;
      for (int32_t j = 0; j < count; j += W) {
        const F v = j + W <= count ? load(x + j) : load_end(x + j, count - j);
        store(out + j, select(mask(words[j / 32] >> (j % 32)), v, set(kNone)));
      }
    } else {
      std::memcpy(out, x, sizeof(float) * count);
    }
    for (int32_t k = batch.bias_start[i]; k < batch.bias_start[i + 1]; k++)
      out[batch.bias_token[k]] += batch.bias_value[k];
    const float repetition = batch.repetition[i], presence = batch.presence[i];
    for (int32_t k = batch.penalty_start[i]; k < batch.penalty_start[i + 1]; k++) {
      const int32_t times = batch.penalty_count[k];
      float v = out[batch.penalty_token[k]];
      v = v > 0 ? v / repetition : v * repetition;
      if (times > 0) v -= presence;
      out[batch.penalty_token[k]] = v - batch.frequency[i] * static_cast<float>(times);
    }
    return out;
  }

  // The choice among the survivors: logits less their maximum, over the temperature, plus noise.
  struct Draw {
    Noise noise;
    double top, temperature;
    double best = -std::numeric_limits<double>::infinity();
    int32_t id = -1;

    double scaled(float x) const { return (static_cast<double>(x) - top) / temperature; }
    uint64_t limit(float x) const { return Noise::limit(best - scaled(x)); }
    // The candidate becomes the best where its noise lifts it there. Noise is at most (leading
    // zeros of ~bits, plus 1) * ln 2, which spares most logarithms.
    void consider(float x, int32_t candidate) {
      const uint64_t bits = noise.bits(candidate);
      const int zeros = bits == ~uint64_t{0} ? 53 : __builtin_clzll(~bits) + 1;
      if (scaled(x) + 0.6931472 * zeros < best) return;
      const double value = scaled(x) + Noise::gumbel(bits);
      if (value < best || (value == best && candidate > id)) return;
      best = value;
      id = candidate;
    }
  };

  int32_t choose(const Row &row, const Batch &batch, int32_t i, Room &room) const {
    const float temperature = batch.temperature[i];
    if (temperature == 0 || row.top == kNone) return row.first_top();
    Draw draw{Noise(batch.seed[i], batch.choice[i], batch.sample_position[i]),
              static_cast<double>(row.top), static_cast<double>(temperature)};
    const int32_t k = batch.top_k[i] > 0 && batch.top_k[i] < row.count ? batch.top_k[i] : 0;
    const double top_p = batch.top_p[i], min_p = batch.min_p[i];
    if (row.top > FLT_MAX) return choose_infinite(row, draw, k, top_p, room);
    if (k == 0 && top_p >= 1 && min_p <= 0) return draw_all(row, draw);
    int32_t n;
    if (k == 0 && min_p <= 0) {
      n = nucleus(row, draw, top_p, room);
    } else {
      n = list(row, draw, k, top_p, min_p, room);
    }
    return draw_list(room.list, n, draw);
  }

  // Ids whose logit is +infinity share all the probability.
  int32_t choose_infinite(const Row &row, Draw &draw, int32_t k, double top_p, Room &room) const {
    int32_t n = row.collect(row.top, room.list);
    if (k > 0) n = lesser(n, k);
    if (top_p < 1) n = greater(1, static_cast<int32_t>(std::ceil(top_p * n)));
    for (int32_t j = 0; j < n; j++) room.list[j].x = 0;
    draw.top = 0;
    return draw_list(room.list, n, draw);
  }

  // Survivors of min-p, top-k and top-p into the list, where few pass the first two.
  static int32_t list(const Row &row, const Draw &draw, int32_t k, double top_p, double min_p,
                      Room &room) {
    float least = k > 0 ? row.floor_of_top(k, room.spare) : -FLT_MAX;
    if (min_p > 0) {
      const double bound = draw.top + draw.temperature * std::log(min_p);
      least = std::max(least, static_cast<float>(bound - 1e-6 * (std::fabs(bound) + 1)));
    }
    int32_t n = row.collect(least, room.list);
    Candidate *list = room.list;
    if (min_p > 0) {
      int32_t kept = 0;
      for (int32_t j = 0; j < n; j++)
        if (std::exp(draw.scaled(list[j].x)) >= min_p) list[kept++] = list[j];
      n = kept;
    }
    if (k > 0 && n > k) {
      std::nth_element(list, list + k, list + n, Before());
      n = k;
    }
    if (top_p >= 1) return n;
    std::sort(list, list + n, Before());
    double total = 0, running = 0;
    for (int32_t j = 0; j < n; j++) total += std::exp(draw.scaled(list[j].x));
    for (int32_t j = 0; j < n; j++) {
      running += std::exp(draw.scaled(list[j].x));
      if (running >= top_p * total) return j + 1;
    }
    return n;
  }

  // Survivors of top-p alone into the list. What lies so low that all of it together weighs at most
  // 1 - top_p is never looked at; the rest is binned by value, and only the bin where the sum
  // reaches top_p is sorted.
  static int32_t nucleus(const Row &row, const Draw &draw, double top_p, Room &room) {
    constexpr int kBins = 256;
    const float scale = static_cast<float>(1 / draw.temperature);
    const double total = row.sum_exp(scale);
    const double ignored = std::log((1 - top_p) * total / row.count);
    const double bound = draw.top + draw.temperature * ignored;
    const float least =
        std::max(-FLT_MAX, static_cast<float>(bound - 1e-6 * (std::fabs(bound) + 1)));
    Candidate *list = room.list;
    const int32_t n = row.collect(least, list);
    const float width = static_cast<float>(kBins / std::max(1.0, -ignored));
    const auto bin = [&](float x) {
      const float at = (row.top - x) * scale * width;
      return at < kBins - 1 ? static_cast<int>(at) : kBins - 1;
    };
    double mass[kBins] = {};
    alignas(64) float weight[W] = {};
    for (int32_t j = 0; j < n; j += W) {
      const int32_t here = lesser(W, n - j);
      for (int32_t i = 0; i < here; i++) weight[i] = list[j + i].x;
      store(weight, exp((load(weight) - set(row.top)) * set(scale)));
      for (int32_t i = 0; i < here; i++) mass[bin(list[j + i].x)] += weight[i];
    }
    const double target = top_p * total;
    double running = 0;
    int last = 0;
    while (last < kBins - 1 && running + mass[last] < target) running += mass[last++];
    const auto sure = [&](const Candidate &c) { return bin(c.x) < last; };
    const auto open = [&](const Candidate &c) { return bin(c.x) == last; };
    Candidate *end = std::partition(list, list + n, sure);
    Candidate *stop = std::partition(end, list + n, open);
    std::sort(end, stop, Before());
    while (end < stop) {
      running += std::exp(draw.scaled(end++->x));
      if (running >= target) break;
    }
    return static_cast<int32_t>(end - list);
  }

  static int32_t draw_list(const Candidate *list, int32_t n, Draw &draw) {
    for (int32_t j = 0; j < n; j++) draw.consider(list[j].x, list[j].id);
    return draw.id;
  }

  // All ids compete. Ids of a block need noise that lifts the block's best above the best so far.
  static int32_t draw_all(const Row &row, Draw &draw) {
    const int32_t first = row.first_top();
    draw.consider(row.x[first], first);
    draw_block(row, first / kBlockValues, draw);
    for (int32_t block = 0; block < row.blocks(); block++)
      if (block != first / kBlockValues) draw_block(row, block, draw);
    return draw.id;
  }

  static void draw_block(const Row &row, int32_t block, Draw &draw) {
    const float most = reduce_max(load(row.cells + block * W));
    if (draw.scaled(most) + 36.8 < draw.best) return;
    uint64_t limit = draw.limit(most);
    const int32_t end = row.block_end(block);
    for (int32_t start = block * kBlockValues; start < end; start += 16) {
      uint32_t hits = draw.noise.reach(start, limit);
      if (end - start < 16) hits &= (1u << (end - start)) - 1;
      if (hits == 0) continue;
      for (; hits; hits &= hits - 1) {
        const int32_t id = start + __builtin_ctz(hits);
        if (row.x[id] > kNone) draw.consider(row.x[id], id);
      }
      limit = draw.limit(most);
    }
  }

  // Log-probability and rank of the token by the raw logits, and the most likely ids.
  void report(const Row &raw, int32_t token, const Batch &batch, int32_t i, Room &room) const {
    const bool finite = raw.top > kNone && raw.top <= FLT_MAX;
    double shift;
    if (finite) {
      shift = std::log(raw.sum_exp(1.0f));
    } else {
      // All the probability lies on the ids that have the infinite maximum.
      int32_t equal = 0;
      for (int32_t j = 0; j < raw.count; j++) equal += raw.top == kNone || raw.x[j] == raw.top;
      shift = std::log(static_cast<double>(equal));
    }
    const auto logprob = [&](float x) {
      if (!finite) return x == raw.top || raw.top == kNone ? static_cast<float>(-shift) : kNone;
      if (!(x > kNone)) return kNone;
      return static_cast<float>(static_cast<double>(x) - static_cast<double>(raw.top) - shift);
    };
    batch.out_logprob[i] = logprob(raw.x[token]);
    batch.out_rank[i] = 1 + raw.count_before(token);
    const int32_t wanted = lesser(lesser(batch.top_logprobs[i], batch.max_top), raw.count);
    if (wanted == 0) return;
    const int32_t n = raw.highest(wanted, room.list, room.spare);
    int32_t *ids = batch.out_top_token + static_cast<size_t>(i) * batch.max_top;
    float *values = batch.out_top_logprob + static_cast<size_t>(i) * batch.max_top;
    for (int32_t j = 0; j < n; j++) {
      ids[j] = room.list[j].id;
      values[j] = logprob(room.list[j].x);
    }
    // Fewer are above -infinity: the rest ties, lowest ids first.
    int32_t filled = n;
    for (int32_t id = 0; filled < wanted; id++) {
      if (raw.x[id] > kNone) continue;
      ids[filled] = id;
      values[filled++] = logprob(kNone);
    }
  }

  SampleArgs a_;
};

}  // namespace

std::vector<std::unique_ptr<Instruction>> make_sample(const SampleArgs &args) {
  std::vector<std::unique_ptr<Instruction>> out;
  out.emplace_back(new Sample(args));
  return out;
}

}  // namespace HR_LEVEL
}  // namespace hr
