// Groups of quantized weights as the kernels see them: packed records (pack.h), and panels opened for
// many rows. Both give the same numbers.
#pragma once
#include <cstring>

#include "dot.h"
#include "linear.h"

namespace hr {
namespace HR_LEVEL {
namespace dot {

// What a group's integer sums are made with.
template <int Bits, int Offset>
struct SumOf {
  using Type = NarrowSum;
};
template <int Offset>
struct SumOf<5, Offset> {
  using Type = MiddleSum<Offset>;
};
template <int Offset>
struct SumOf<6, Offset> {
  using Type = MiddleSum<Offset>;
};
template <int Offset>
struct SumOf<8, Offset> {
  using Type = WideSum;
};

// A group's record as packed.
template <Layout L, Scales S, bool HasMinimum, bool Fine>
struct Record {
  static constexpr Scheme scheme{L, S, HasMinimum, Fine};
  static constexpr int bits = scheme.bits();
  static constexpr bool narrow = bits <= 4 && !scheme.coded();  // a minimum takes the offset off
  static constexpr bool minimum = HasMinimum || narrow;
  static constexpr bool fine = Fine;
  static constexpr int halves = Fine ? 2 : 1;
  using Sum = typename SumOf<scheme.coded() ? 8 : bits, scheme.offset()>::Type;

  const uint8_t *record, *header;

  static HR_INLINE Record at(const uint8_t *panel, int32_t group) {
    return {panel + scheme.record_at(group), panel + scheme.header_at(group)};
  }

  // Values 4 J to 4 J + 3 of the group's first and second half, of all columns.
  template <int J>
  HR_INLINE void quads(Bytes &first, Bytes &second) const {
    if (bits == 8) {
      first = load_bytes(record + 64 * J);
      second = load_bytes(record + 64 * (J + 4));
      return;
    }
    if (bits >= 4) {
      Bytes both = load_bytes(record + 64 * J);
      first = low_nibbles(both);
      second = high_nibbles(both);
    }
    if (scheme.coded()) {
      first = look_up(scheme.codes(), first);
      second = look_up(scheme.codes(), second);
    }
    if (bits == 6) {
      Bytes pairs = load_bytes(record + 256 + 64 * (J / 2));
      first = either(first, moved<J % 2 * 4, 4, 3>(pairs));
      second = either(second, moved<J % 2 * 4 + 2, 4, 3>(pairs));
    }
    if (bits < 4) {
      Bytes pairs = load_bytes(record + 64 * (J / 2));
      first = moved<J % 2 * 4, 0, 3>(pairs);
      second = moved<J % 2 * 4 + 2, 0, 3>(pairs);
    }
    if (bits == 5 || bits == 3) {
      Bytes single = load_bytes(record + (bits == 5 ? 256 : 128));
      first = either(first, moved<2 * J, bits - 1, 1>(single));
      second = either(second, moved<2 * J + 1, bits - 1, 1>(single));
    }
  }
  HR_INLINE Floats scale(int half) const { return factor(scheme.value_bytes(), half, 0); }
  HR_INLINE Floats low(int half) const {
    if (!HasMinimum) return mul(scale(half), broadcast(static_cast<float>(-scheme.offset())));
    if (S == Scales::zeroed) return mul(scale(half), load_signed(bytes(scheme.minima_at(), half)));
    return factor(scheme.minima_at(), half, 1);
  }

 private:
  // Sixteen signed bytes of a half, in the part of the record that begins at `at`.
  HR_INLINE const int8_t *bytes(size_t at, int half) const {
    return reinterpret_cast<const int8_t *>(record + at) + kColumns * half;
  }
  HR_INLINE Floats factor(size_t at, int half, int kind) const {
    const uint8_t *from = record + at + static_cast<size_t>(half) * kColumns * scheme.scale_size();
    if (S == Scales::single) return load(reinterpret_cast<const float *>(from));
    if (S != Scales::coarse) return load_half(reinterpret_cast<const uint16_t *>(from));
    return mul(load_half(reinterpret_cast<const uint16_t *>(header) + kColumns * kind),
               load_signed(bytes(at, half)));
  }
};

// A record opened: a byte a value, float32 scales and minima.
template <class Sums, bool HasMinimum, bool Fine>
struct Opened {
  static constexpr bool minimum = HasMinimum;
  static constexpr bool fine = Fine;
  static constexpr int halves = Fine ? 2 : 1;
  static constexpr size_t bytes = 512 + 64 * static_cast<size_t>(halves) * (minimum ? 2 : 1);
  using Sum = Sums;

  const uint8_t *record;

  static HR_INLINE Opened at(const uint8_t *panel, int32_t group) {
    return {panel + static_cast<size_t>(group) * bytes};
  }
  template <int J>
  HR_INLINE void quads(Bytes &first, Bytes &second) const {
    first = load_bytes(record + 64 * J);
    second = load_bytes(record + 64 * (J + 4));
  }
  HR_INLINE Floats scale(int half) const { return factor(half); }
  HR_INLINE Floats low(int half) const { return factor(halves + half); }

 private:
  HR_INLINE Floats factor(int slot) const {
    return load(reinterpret_cast<const float *>(record + 512) + kColumns * slot);
  }
};
template <class R>
using OpenedOf = Opened<typename R::Sum, R::minimum, R::fine>;

template <class R, int J>
HR_INLINE void open_quads(const R &from, uint8_t *to) {
  Bytes first, second;
  from.template quads<J>(first, second);
  std::memcpy(to + 64 * J, &first, 64);
  std::memcpy(to + 64 * (J + 4), &second, 64);
}

// Opens a panel into `out`.
template <class R>
void open_panel(const uint8_t *panel, int32_t groups, uint8_t *out) {
  for (int32_t g = 0; g < groups; ++g) {
    const R from = R::at(panel, g);
    uint8_t *to = out + static_cast<size_t>(g) * OpenedOf<R>::bytes;
    open_quads<R, 0>(from, to);
    open_quads<R, 1>(from, to);
    open_quads<R, 2>(from, to);
    open_quads<R, 3>(from, to);
    auto *floats = reinterpret_cast<float *>(to + 512);
    for (int half = 0; half < R::halves; ++half) {
      store(floats + kColumns * half, from.scale(half));
      if (R::minimum) store(floats + kColumns * (R::halves + half), from.low(half));
    }
  }
}

}  // namespace dot
}  // namespace HR_LEVEL
}  // namespace hr
