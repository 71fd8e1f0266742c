// The Python side of the module. Addresses are plain integers: the back-end owns the arrays behind them
// and keeps them alive as long as the program.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "levels.h"
#include "memory.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
T *at(uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

hr::Activation activation_of(const std::string &name) {
  if (name == "silu") return hr::Activation::silu;
  if (name == "gelu") return hr::Activation::gelu;
  if (name == "gelu_tanh") return hr::Activation::gelu_tanh;
  if (name == "relu") return hr::Activation::relu;
  if (name == "relu2") return hr::Activation::relu2;
  if (name == "swiglu_oai") return hr::Activation::swiglu_oai;
  throw std::invalid_argument("unknown activation " + name);
}

hr::NormKind norm_of(const std::string &name) {
  if (name == "rms") return hr::NormKind::rms;
  if (name == "layer") return hr::NormKind::layer;
  if (name == "none") return hr::NormKind::none;
  throw std::invalid_argument("unknown norm " + name);
}

hr::KVType kv_type_of(const std::string &name) {
  if (name == "f16") return hr::KVType::f16;
  if (name == "f32") return hr::KVType::f32;
  if (name == "int8") return hr::KVType::int8;
  throw std::invalid_argument("unknown KV type " + name);
}

// A program with everything it runs on but the memory, which Python hands over.
class PyProgram {
 public:
  PyProgram(const std::string &level, int32_t threads)
      : level_(hr::find_level(level)), threads_(threads) {}

  void set_kv(uintptr_t pages, size_t page_bytes, size_t layer_bytes, int32_t block_size,
              int32_t kv_heads, int32_t head_dim, const std::string &type) {
    kv_ = {at<uint8_t>(pages),
           page_bytes,
           layer_bytes,
           layer_bytes / static_cast<size_t>(kv_heads),
           block_size,
           kv_heads,
           head_dim,
           kv_type_of(type)};
  }

  void add_copy(int32_t layers_per_page) { program_.add(level_.make_copy({kv_, layers_per_page})); }

  void add_embed(uintptr_t out, const hr::Weight &table, const hr::Weight *positions, float scale) {
    program_.add(level_.make_embed({at<float>(out), &table, positions, scale}));
  }

  void add_norm(uintptr_t x, uintptr_t out, uintptr_t residual, uintptr_t weight, uintptr_t bias,
                int32_t width, float eps, float residual_scale, const std::string &kind) {
    program_.add(level_.make_norm({at<float>(x), at<float>(out), at<float>(residual),
                                   at<float>(weight), at<float>(bias), width, eps, residual_scale,
                                   norm_of(kind)}));
  }

  void add_linear(uintptr_t x, uintptr_t out, const hr::Weight &weight, uintptr_t bias,
                  uintptr_t quantized, bool logits, float scale, float softcap) {
    program_.add(level_.make_linear({at<float>(x), at<float>(out), &weight, at<float>(bias),
                                     at<uint8_t>(quantized), logits, scale, softcap, threads_}));
  }

  void add_gated(uintptr_t x, uintptr_t out, int32_t width, const std::string &activation,
                 bool gated) {
    program_.add(level_.make_gated(
        {at<float>(x), at<float>(out), width, activation_of(activation), gated}));
  }

  void add_rope_store(uintptr_t qkv, uintptr_t out, int32_t table_row, int32_t layer_in_page,
                      int32_t heads, uintptr_t cos, uintptr_t sin, int32_t rotary, bool pairs,
                      uintptr_t q_norm, uintptr_t k_norm, bool norm_row, float eps,
                      int32_t low_rows, uintptr_t near, int32_t near_position) {
    program_.add(level_.make_rope_store({at<float>(qkv), at<float>(out), kv_, table_row,
                                         layer_in_page, heads, at<float>(cos), at<float>(sin),
                                         rotary, pairs, at<float>(q_norm), at<float>(k_norm),
                                         norm_row, eps, low_rows, at<float>(near),
                                         near_position}));
  }

  hr::AttentionArgs attention(uintptr_t q, uintptr_t out, int32_t table_row, int32_t layer_in_page,
                              int32_t heads, float scale, int32_t window, int32_t first,
                              float softcap, uintptr_t sinks, int32_t max_rows,
                              int32_t max_positions, uintptr_t shared, bool has_near,
                              uintptr_t near) const {
    return {at<float>(q), at<float>(out), kv_,   table_row,        layer_in_page, heads,
            scale,        window,         first, softcap,          at<float>(sinks), max_rows,
            max_positions, threads_,      at<uint8_t>(shared), has_near, at<float>(near)};
  }

  void add_attention(uintptr_t q, uintptr_t out, int32_t table_row, int32_t layer_in_page,
                     int32_t heads, float scale, int32_t window, int32_t first, float softcap,
                     uintptr_t sinks, int32_t max_rows, int32_t max_positions, uintptr_t shared,
                     bool has_near, uintptr_t near) {
    program_.add(level_.make_attention(attention(q, out, table_row, layer_in_page, heads, scale,
                                                 window, first, softcap, sinks, max_rows,
                                                 max_positions, shared, has_near, near)));
  }

  size_t attention_shared_bytes(int32_t heads, int32_t window, int32_t first, int32_t max_rows,
                                int32_t max_positions) const {
    return level_.attention_shared_bytes(attention(0, 0, 0, 0, heads, 1.0f, window, first, 0.0f, 0,
                                                   max_rows, max_positions, 0, false, 0));
  }

  void add_sample(uintptr_t logits, int32_t vocabulary, int32_t stride) {
    program_.begin_sampling();
    program_.add(level_.make_sample({at<float>(logits), vocabulary, stride}));
  }

  size_t scratch_bytes() const { return program_.scratch_bytes(); }
  size_t owned_bytes() const { return program_.owned_bytes(); }

  void bind(hr::Pool &pool, uintptr_t scratch) { program_.bind(&pool, at<uint8_t>(scratch)); }

  // The batch's arrays by name (runtime.h), and the sizes that go with them.
  void bind_batch(const nb::dict &arrays, const nb::dict &sizes) {
    auto set = [&](auto &field, const char *name) {
      using Pointer = std::remove_reference_t<decltype(field)>;
      field = reinterpret_cast<Pointer>(nb::cast<uintptr_t>(arrays[name]));
    };
    hr::Batch &b = batch_;
    set(b.token, "token");
    set(b.position, "position");
    set(b.slice_row, "slice_row");
    set(b.slice_slot, "slice_slot");
    set(b.table, "table");
    set(b.logits_row, "logits_row");
    set(b.copy, "copy");
    set(b.sample_row, "sample_row");
    set(b.forced, "forced");
    set(b.temperature, "temperature");
    set(b.top_k, "top_k");
    set(b.top_p, "top_p");
    set(b.min_p, "min_p");
    set(b.repetition, "repetition");
    set(b.presence, "presence");
    set(b.frequency, "frequency");
    set(b.seed, "seed");
    set(b.choice, "choice");
    set(b.sample_position, "sample_position");
    set(b.top_logprobs, "top_logprobs");
    set(b.penalty_start, "penalty_start");
    set(b.penalty_token, "penalty_token");
    set(b.penalty_count, "penalty_count");
    set(b.bias_start, "bias_start");
    set(b.bias_token, "bias_token");
    set(b.bias_value, "bias_value");
    set(b.mask_index, "mask_index");
    set(b.masks, "masks");
    set(b.out_token, "out_token");
    set(b.out_logprob, "out_logprob");
    set(b.out_rank, "out_rank");
    set(b.out_top_token, "out_top_token");
    set(b.out_top_logprob, "out_top_logprob");
    b.table_rows = nb::cast<int32_t>(sizes["table_rows"]);
    b.max_blocks = nb::cast<int32_t>(sizes["max_blocks"]);
    b.mask_words = nb::cast<int32_t>(sizes["mask_words"]);
    b.max_top = nb::cast<int32_t>(sizes["max_top"]);
  }

  void run(int32_t tokens, int32_t slices, int32_t logits, int32_t samples, int32_t copies,
           int part) {
    hr::Step step{&batch_, tokens, slices, logits, samples, copies};
    nb::gil_scoped_release release;
    program_.run(step, static_cast<hr::Program::Part>(part));
  }

  using Row = std::tuple<std::string, std::string, double, double, double>;
  std::vector<Row> profile(int32_t tokens, int32_t slices, int32_t logits, int32_t samples,
                           int32_t copies) {
    hr::Step step{&batch_, tokens, slices, logits, samples, copies};
    std::vector<hr::Timing> timings;
    {
      nb::gil_scoped_release release;
      timings = program_.profile(step);
    }
    std::vector<Row> rows;
    for (const hr::Timing &t : timings)
      rows.emplace_back(t.instruction->op, t.instruction->path, t.seconds, t.bytes, t.flops);
    return rows;
  }

  // (op, path) of every instruction.
  std::vector<std::tuple<std::string, std::string>> paths() const {
    std::vector<std::tuple<std::string, std::string>> found;
    for (const auto &instruction : program_.instructions())
      found.emplace_back(instruction->op, instruction->path);
    return found;
  }

 private:
  const hr::Level &level_;
  int32_t threads_;
  hr::KVGeometry kv_{};
  hr::Batch batch_{};
  hr::Program program_;
};

using Part = std::tuple<std::string, int32_t, uintptr_t, bool>;

hr::Weight make_weight(const std::vector<Part> &parts, const std::vector<int32_t> &order,
                       int32_t depth) {
  std::vector<hr::Source> sources;
  for (const auto &[format, rows, address, release] : parts)
    sources.push_back({format, rows, at<uint8_t>(address), release});
  return hr::Weight(std::move(sources), order, depth);
}

// Sums a rate over all threads of the pool, each measuring at the same time.
template <class Measure>
double total_rate(hr::Pool &pool, Measure measure) {
  std::vector<double> rates(static_cast<size_t>(pool.threads()));
  nb::gil_scoped_release release;
  pool.together([&](int thread) { rates[static_cast<size_t>(thread)] = measure(thread); });
  double total = 0;
  for (double rate : rates) total += rate;
  return total;
}

double measure(hr::Pool &pool, const std::string &level, const std::string &what, double seconds) {
  const hr::Limits &limits = hr::find_level(level).limits();
  auto of = [&](double (*rate)(double)) {
    return total_rate(pool, [&](int) { return rate(seconds); });
  };
  if (what == "dot4") return of(limits.dot4);
  if (what == "dot8") return of(limits.dot8);
  if (what == "fma") return of(limits.fma);
  throw std::invalid_argument("unknown limit " + what + "; one of dot4, dot8, fma");
}

double measure_read(hr::Pool &pool, const std::string &level, size_t bytes, double seconds) {
  const hr::Limits &limits = hr::find_level(level).limits();
  hr::Arena arena(bytes);
  arena.touch(pool);
  size_t share = arena.bytes() / static_cast<size_t>(pool.threads()) / 256 * 256;
  return total_rate(pool, [&](int thread) {
    return limits.read(arena.data() + share * static_cast<size_t>(thread), share, seconds);
  });
}

}  // namespace

NB_MODULE(_native, m) {
  m.def(
      "levels",
      [] {
        std::vector<std::string> names;
        for (const hr::Level *level : hr::levels()) names.push_back(level->name);
        return names;
      },
      "Names of the levels that this machine runs, best first.");
  m.def("layout", [](const std::string &format) { return hr::scheme_of(format).name(); },
        "The packed layout of a weight format; ValueError where there is none.");

  nb::class_<hr::Pool>(m, "Pool")
      .def(nb::init<int, const std::vector<int> &>(), "threads"_a, "cpus"_a)
      .def_prop_ro("threads", &hr::Pool::threads);

  nb::class_<hr::Arena>(m, "Arena")
      .def(nb::init<size_t>(), "bytes"_a)
      .def_prop_ro("address",
                   [](const hr::Arena &a) { return reinterpret_cast<uintptr_t>(a.data()); })
      .def_prop_ro("bytes", &hr::Arena::bytes)
      .def("touch", &hr::Arena::touch, "pool"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("populate", &hr::Arena::populate, "offset"_a, "bytes"_a,
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<hr::Weight>(m, "Weight")
      .def("__init__",
           [](hr::Weight *self, const std::vector<Part> &parts, const std::vector<int32_t> &order,
              int32_t depth) { new (self) hr::Weight(make_weight(parts, order, depth)); },
           "parts"_a, "order"_a, "depth"_a)
      .def("pack",
           [](hr::Weight &self, uintptr_t address, hr::Pool &pool) {
             self.pack(at<uint8_t>(address), pool);
           },
           "address"_a, "pool"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes", &hr::Weight::bytes)
      .def_prop_ro("layouts", &hr::Weight::layouts)
      .def_prop_ro("quantized", &hr::Weight::quantized);

  m.def("quantized_bytes",
        [](int32_t rows, int32_t depth) {
          hr::QuantizedRow row((depth + hr::kGroup - 1) / hr::kGroup);
          return row.bytes * static_cast<size_t>(rows);
        },
        "rows"_a, "depth"_a, "Bytes of `rows` rows of quantized activations.");
  m.def("measure", &measure, "pool"_a, "level"_a, "what"_a, "seconds"_a,
        "Multiply-adds a second of all threads: dot4, dot8 or fma.");
  m.def("measure_read", &measure_read, "pool"_a, "level"_a, "bytes"_a, "seconds"_a,
        "Bytes a second that all threads read from a buffer of that size.");

  nb::class_<PyProgram>(m, "Program")
      .def(nb::init<const std::string &, int32_t>(), "level"_a, "threads"_a)
      .def("set_kv", &PyProgram::set_kv, "pages"_a, "page_bytes"_a, "layer_bytes"_a, "block_size"_a,
           "kv_heads"_a, "head_dim"_a, "type"_a)
      .def("add_copy", &PyProgram::add_copy, "layers_per_page"_a)
      .def("add_embed", &PyProgram::add_embed, "out"_a, "table"_a, "positions"_a.none(), "scale"_a,
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("add_norm", &PyProgram::add_norm, "x"_a, "out"_a, "residual"_a, "weight"_a, "bias"_a,
           "width"_a, "eps"_a, "residual_scale"_a, "kind"_a)
      .def("add_linear", &PyProgram::add_linear, "x"_a, "out"_a, "weight"_a, "bias"_a, "quantized"_a,
           "logits"_a, "scale"_a, "softcap"_a, nb::keep_alive<1, 4>())
      .def("add_gated", &PyProgram::add_gated, "x"_a, "out"_a, "width"_a, "activation"_a, "gated"_a)
      .def("add_rope_store", &PyProgram::add_rope_store, "qkv"_a, "out"_a, "table_row"_a,
           "layer_in_page"_a, "heads"_a, "cos"_a, "sin"_a, "rotary"_a, "pairs"_a, "q_norm"_a,
           "k_norm"_a, "norm_row"_a, "eps"_a, "low_rows"_a, "near"_a, "near_position"_a)
      .def("add_attention", &PyProgram::add_attention, "q"_a, "out"_a, "table_row"_a,
           "layer_in_page"_a, "heads"_a, "scale"_a, "window"_a, "first"_a, "softcap"_a, "sinks"_a,
           "max_rows"_a, "max_positions"_a, "shared"_a, "has_near"_a, "near"_a)
      .def("attention_shared_bytes", &PyProgram::attention_shared_bytes, "heads"_a, "window"_a,
           "first"_a, "max_rows"_a, "max_positions"_a)
      .def("add_sample", &PyProgram::add_sample, "logits"_a, "vocabulary"_a, "stride"_a)
      .def_prop_ro("scratch_bytes", &PyProgram::scratch_bytes)
      .def_prop_ro("owned_bytes", &PyProgram::owned_bytes)
      .def("bind", &PyProgram::bind, "pool"_a, "scratch"_a, nb::keep_alive<1, 2>())
      .def("bind_batch", &PyProgram::bind_batch, "arrays"_a, "sizes"_a)
      .def("run", &PyProgram::run, "tokens"_a, "slices"_a, "logits"_a, "samples"_a, "copies"_a,
           "part"_a)
      .def("profile", &PyProgram::profile, "tokens"_a, "slices"_a, "logits"_a, "samples"_a,
           "copies"_a)
      .def_prop_ro("paths", &PyProgram::paths);
}
