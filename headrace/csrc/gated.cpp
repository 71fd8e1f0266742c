// Gated of spec.py: act(gate) * up, or act(x), on any number of rows.
#include "rows.h"
#include "vmath.h"

namespace hr {
namespace HR_LEVEL {
namespace {

// Vectors that fill the pipelines of the level, as measured (avx2).
#if defined(HR_LEVEL_AVX2)
constexpr int kTogether = 4;
#else
constexpr int kTogether = 1;
#endif
// Values ahead that the memory is asked for.
constexpr int32_t kAhead = 512;

template <Activation A, class V>
HR_INLINE V activate(V x) {
  if constexpr (A == Activation::silu) {
    return x * sigmoid(x);
  } else if constexpr (A == Activation::gelu) {
    return x * normal_cdf(x);
  } else if constexpr (A == Activation::gelu_tanh) {
    const V inner = fill<V>(0.7978845608f) * (x + fill<V>(0.044715f) * x * x * x);
    return fill<V>(0.5f) * x * (fill<V>(1.0f) + tanh(inner));
  } else if constexpr (A == Activation::relu) {
    return max(x, fill<V>(0.0f));
  } else if constexpr (A == Activation::relu2) {
    const V v = max(x, fill<V>(0.0f));
    return v * v;
  } else {
    const V gate = min(x, fill<V>(7.0f));
    return gate * sigmoid(fill<V>(1.702f) * gate);
  }
}

template <Activation A, class V>
HR_INLINE V combine(V gate, V up) {
  if constexpr (A == Activation::swiglu_oai) {
    up = max(min(up, fill<V>(7.0f)), fill<V>(-7.0f)) + fill<V>(1.0f);
  }
  return activate<A>(gate) * up;
}

template <Activation A>
void apply(const float *x, const float *up, float *out, int32_t count) {
  int32_t i = 0;
  for (; i + kTogether * W <= count; i += kTogether * W) {
    const auto from = [i](const float *p) {
      return many<kTogether>([&](int k) { return load(p + i + k * W); });
    };
    for (int32_t k = i + kAhead; k < i + kAhead + kTogether * W; k += 16) {
      __builtin_prefetch(x + k);
      if (up) __builtin_prefetch(up + k);
      __builtin_prefetch(out + k, 1);
    }
    const auto gate = from(x);
    const auto result = up ? combine<A>(gate, from(up)) : activate<A>(gate);
    for (int k = 0; k < kTogether; k++) store(out + i + k * W, result.v[k]);
  }
  for (; i + W <= count; i += W) {
    const F gate = load(x + i);
    store(out + i, up ? combine<A>(gate, load(up + i)) : activate<A>(gate));
  }
  if (i == count) return;
  const int rest = count - i;
  const F gate = load_part(x + i, rest);
  store_part(out + i, up ? combine<A>(gate, load_part(up + i, rest)) : activate<A>(gate), rest);
}

using Apply = void (*)(const float *, const float *, float *, int32_t);

Apply kernel(Activation activation) {
  switch (activation) {
    case Activation::silu: return apply<Activation::silu>;
    case Activation::gelu: return apply<Activation::gelu>;
    case Activation::gelu_tanh: return apply<Activation::gelu_tanh>;
    case Activation::relu: return apply<Activation::relu>;
    case Activation::relu2: return apply<Activation::relu2>;
    default: return apply<Activation::swiglu_oai>;
  }
}

// A piece is some columns of some rows: whole rows where they are narrow, else parts of one row.
class Gated final : public Instruction {
 public:
  explicit Gated(const GatedArgs &args) : a_(args), apply_(kernel(args.activation)) {
    op = "gated";
    path = HR_LEVEL_NAME;
    rows_ = greater(1, kColumns / a_.width);
    columns_ = lesser(a_.width, kColumns);
    cuts_ = ceil_div(a_.width, columns_);
  }

  int32_t pieces(const Step &step) const override { return ceil_div(step.tokens, rows_) * cuts_; }

  void run(const Step &step, int32_t piece, Scratch &) const override {
    const int32_t first = piece / cuts_ * rows_, end = lesser(step.tokens, first + rows_);
    const int32_t column = piece % cuts_ * columns_;
    const int32_t count = lesser(columns_, a_.width - column);
    const size_t width = static_cast<size_t>(a_.width), stride = a_.gated ? 2 * width : width;
    for (int32_t row = first; row < end; row++) {
      const float *x = a_.x + row * stride + column;
      apply_(x, a_.gated ? x + width : nullptr, a_.out + row * width + column, count);
    }
  }

  double bytes(const Step &step) const override {
    return 4.0 * step.tokens * a_.width * (a_.gated ? 3 : 2);
  }

 private:
  static constexpr int32_t kColumns = 8192;  // a few microseconds

  GatedArgs a_;
  Apply apply_;
  int32_t rows_, columns_, cuts_;
};

}  // namespace

std::unique_ptr<Instruction> make_gated(const GatedArgs &args) {
  return std::unique_ptr<Instruction>(new Gated(args));
}

}  // namespace HR_LEVEL
}  // namespace hr
