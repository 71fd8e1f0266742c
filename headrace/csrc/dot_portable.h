// dot.h in plain C++.
#pragma once
#include <cstdint>
#include <cstring>

#include "level.h"

namespace hr {
namespace HR_LEVEL {
namespace dot {

// Plain C++ on 16-byte vectors of the compiler (GCC and Clang), four to the sixteen columns, for any CPU.
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef uint16_t Half8 __attribute__((vector_size(16)));
typedef uint16_t Half4 __attribute__((vector_size(8)));

struct Floats {
  Float4 v[4];
};
struct Ints {
  Int4 v[4];
};
struct Bytes {
  Half8 v[4];
};
// Even and odd activations, widened, in every lane.
struct Quad {
  Short8 even, odd;
};

// {f(0), f(1), f(2), f(3)}
template <class T, class Each>
HR_INLINE T quarters(Each each) {
  return T{{each(0), each(1), each(2), each(3)}};
}

HR_INLINE Floats zero() { return {}; }
HR_INLINE Floats broadcast(float x) {
  return quarters<Floats>([&](int) { return Float4{x, x, x, x}; });
}
HR_INLINE Floats load(const float *p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
HR_INLINE void store(float *p, Floats x) { std::memcpy(p, &x, sizeof x); }
HR_INLINE Word4 load_words(const uint16_t *p) {
  Half4 raw;
  std::memcpy(&raw, p, sizeof raw);
  return __builtin_convertvector(raw, Word4);
}
// Finite halves: the exponent is moved by a multiplication, which is exact for subnormals too.
HR_INLINE Floats load_half(const uint16_t *p) {
  return quarters<Floats>([&](int i) {
    Word4 raw = load_words(p + 4 * i);
    Float4 value = reinterpret_cast<Float4>((raw & 0x7fff) << 13) * 0x1p112f;
    return reinterpret_cast<Float4>(reinterpret_cast<Word4>(value) | (raw & 0x8000) << 16);
  });
}
HR_INLINE Floats load_brain(const uint16_t *p) {
  return quarters<Floats>([&](int i) { return reinterpret_cast<Float4>(load_words(p + 4 * i) << 16); });
}
HR_INLINE Floats mul(Floats a, Floats b) {
  return quarters<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
HR_INLINE Floats add(Floats a, Floats b) {
  return quarters<Floats>([&](int i) { return a.v[i] + b.v[i]; });
}
HR_INLINE Floats maximum(Floats a, Floats b) {
  return quarters<Floats>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
HR_INLINE Floats absolute(Floats a) {
  return quarters<Floats>([&](int i) {
    return reinterpret_cast<Float4>(reinterpret_cast<Word4>(a.v[i]) & 0x7fffffffu);
  });
}
// a * b + c, rounded twice: not every CPU fuses.
HR_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return quarters<Floats>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
HR_INLINE float highest(Floats a) {
  float best = a.v[0][0];
  for (int i = 1; i < 16; ++i) best = a.v[i / 4][i % 4] > best ? a.v[i / 4][i % 4] : best;
  return best;
}
HR_INLINE Floats to_float(Ints a) {
  return quarters<Floats>([&](int i) { return __builtin_convertvector(a.v[i], Float4); });
}
// Sixteen values rounded to nearest even, as signed bytes; returns their sum.
HR_INLINE int32_t store_bytes(int8_t *p, Floats x) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    // Adding 1.5 * 2^23 leaves the rounded value in the low bits.
    float moved = x.v[i / 4][i % 4] + 12582912.0f;
    int32_t whole;
    std::memcpy(&whole, &moved, 4);
    whole -= 0x4b400000;
    p[i] = static_cast<int8_t>(whole);
    sum += whole;
  }
  return sum;
}

HR_INLINE Bytes load_bytes(const uint8_t *p) {
  Bytes b;
  std::memcpy(&b, p, sizeof b);
  return b;
}
HR_INLINE Bytes low_nibbles(Bytes b) {
  return quarters<Bytes>([&](int i) { return b.v[i] & 0x0f0f; });
}
HR_INLINE Bytes high_nibbles(Bytes b) {
  return quarters<Bytes>([&](int i) { return b.v[i] >> 4 & 0x0f0f; });
}
HR_INLINE Quad load_quad(const int8_t *p) {
  int32_t even = static_cast<uint16_t>(p[0]) | static_cast<int32_t>(p[2]) * 65536;
  int32_t odd = static_cast<uint16_t>(p[1]) | static_cast<int32_t>(p[3]) * 65536;
  return {reinterpret_cast<Short8>(Int4{even, even, even, even}),
          reinterpret_cast<Short8>(Int4{odd, odd, odd, odd})};
}
HR_INLINE Floats load_signed(const int8_t *p) {
  return quarters<Floats>([&](int i) {
    const int8_t *q = p + 4 * i;
    return __builtin_convertvector(Int4{q[0], q[1], q[2], q[3]}, Float4);
  });
}
HR_INLINE Bytes either(Bytes a, Bytes b) {
  return quarters<Bytes>([&](int i) { return a.v[i] | b.v[i]; });
}
// table[b] for each byte, which is below 16.
HR_INLINE Bytes look_up(const int8_t *table, Bytes b) {
  uint8_t at[64];
  std::memcpy(at, &b, sizeof at);
  for (uint8_t &byte : at) byte = static_cast<uint8_t>(table[byte]);
  std::memcpy(&b, at, sizeof at);
  return b;
}
// The bits `Mask` of each byte from place `From` on, moved to place `To`.
template <int From, int To, int Mask>
HR_INLINE Bytes moved(Bytes b) {
  return quarters<Bytes>([&](int i) {
    Half8 v = From < To ? b.v[i] << (From < To ? To - From : 0) : b.v[i] >> (From < To ? 0 : From - To);
    return v & static_cast<uint16_t>(0x0101 * (Mask << To));
  });
}
// The two 16-bit halves of each 32-bit lane, added.
HR_INLINE Int4 pair_sums(Short8 pairs) {
  Int4 words = reinterpret_cast<Int4>(pairs);
  return (reinterpret_cast<Int4>(reinterpret_cast<Word4>(words) << 16) >> 16) + (words >> 16);
}

// Pair sums in 16 bits: 32 products of at most 15 * 127 spread over two lanes stay below 2^15.
struct NarrowSum {
  static constexpr bool kWhole = false;
  Short8 v[4];
  HR_INLINE void begin(int32_t) { v[0] = v[1] = v[2] = v[3] = Short8{}; }
  HR_INLINE void add(Bytes w, Quad x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      v[i] += reinterpret_cast<Short8>(w.v[i] & 0xff) * x.even +
              reinterpret_cast<Short8>(w.v[i] >> 8) * x.odd;
  }
  HR_INLINE Ints total() const {
    return quarters<Ints>([&](int i) { return pair_sums(v[i]); });
  }
};
// Unsigned weights of up to 6 bits less an offset, which begin() takes off with the sum of the group's
// activations: pairs reach 63 * 127 * 2, below 2^15; their sums need 32 bits.
template <int Offset>
struct MiddleSum {
  static constexpr bool kWhole = Offset != 0;
  Int4 v[4];
  HR_INLINE void begin(int32_t activations) {
    const int32_t off = -Offset * activations;
    v[0] = v[1] = v[2] = v[3] = Int4{off, off, off, off};
  }
  HR_INLINE void add(Bytes w, Quad x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      v[i] += pair_sums(reinterpret_cast<Short8>(w.v[i] & 0xff) * x.even +
                        reinterpret_cast<Short8>(w.v[i] >> 8) * x.odd);
  }
  HR_INLINE Ints total() const { return {{v[0], v[1], v[2], v[3]}}; }
};
// Pairs reach 128 * 127 * 2, below 2^15; their sums need 32 bits.
struct WideSum {
  static constexpr bool kWhole = false;
  Int4 v[4];
  HR_INLINE void begin(int32_t) { v[0] = v[1] = v[2] = v[3] = Int4{}; }
  HR_INLINE void add(Bytes w, Quad x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Short8 even = reinterpret_cast<Short8>(w.v[i] << 8) >> 8;
      Short8 odd = reinterpret_cast<Short8>(w.v[i]) >> 8;
      v[i] += pair_sums(even * x.even + odd * x.odd);
    }
  }
  HR_INLINE Ints total() const { return {{v[0], v[1], v[2], v[3]}}; }
};

}  // namespace dot
}  // namespace HR_LEVEL
}  // namespace hr
