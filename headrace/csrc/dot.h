// Sixteen columns at a time: float lanes, and the integer dot products of quantized weights.
//
// `Bytes` holds 16 columns x 4 consecutive values of K. `NarrowSum` adds up to 32 products of unsigned
// nibbles, `MiddleSum` and `WideSum` any number of products of unsigned 6-bit values and of signed bytes,
// each with activations in [-127, 127]; all are exact. One instruction family per level serves any number of rows.
#pragma once
#include <cstdint>
#include <cstring>

#include "level.h"

#define HR_INLINE inline __attribute__((always_inline))

namespace hr {
namespace HR_LEVEL {
namespace dot {

#if defined(HR_LEVEL_AVX512)

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {
  __m512i v;
};
// Four activations, repeated in every lane.
struct Quad {
  __m512i v;
};

HR_INLINE Floats zero() { return {_mm512_setzero_ps()}; }
HR_INLINE Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE Floats load(const float *p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float *p, Floats x) { _mm512_storeu_ps(p, x.v); }
HR_INLINE Floats load_half(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
HR_INLINE Floats load_brain(const uint16_t *p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
HR_INLINE Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE Floats maximum(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
// a * b + c, rounded once where the level has fused multiply-adds.
HR_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE float highest(Floats a) { return _mm512_reduce_max_ps(a.v); }
HR_INLINE Floats to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Sixteen values rounded to nearest even, as signed bytes; returns their sum.
HR_INLINE int32_t store_bytes(int8_t *p, Floats x) {
  __m512i whole = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}

HR_INLINE Bytes load_bytes(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE Bytes low_nibbles(Bytes b) {
  return {_mm512_and_si512(b.v, _mm512_set1_epi8(15))};
}
HR_INLINE Bytes high_nibbles(Bytes b) {
  return {_mm512_and_si512(_mm512_srli_epi16(b.v, 4), _mm512_set1_epi8(15))};
}
HR_INLINE Quad load_quad(const int8_t *p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
HR_INLINE Floats load_signed(const int8_t *p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw))};
}
HR_INLINE Bytes either(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
// table[b] for each byte, which is below 16.
HR_INLINE Bytes look_up(const int8_t *table, Bytes b) {
  __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), b.v)};
}
// The bits `Mask` of each byte from place `From` on, moved to place `To`.
template <int From, int To, int Mask>
HR_INLINE Bytes moved(Bytes b) {
  __m512i v = From < To ? _mm512_slli_epi16(b.v, From < To ? To - From : 0)
                        : _mm512_srli_epi16(b.v, From < To ? 0 : From - To);
  return {_mm512_and_si512(v, _mm512_set1_epi8(Mask << To))};
}

struct NarrowSum {
  static constexpr bool kWhole = false;
  __m512i v;
  HR_INLINE void begin(int32_t) { v = _mm512_setzero_si512(); }
  HR_INLINE void add(Bytes w, Quad x) { v = _mm512_dpbusd_epi32(v, w.v, x.v); }
  HR_INLINE Ints total() const { return {v}; }
};
// Unsigned weights less an offset, which begin() takes off with the sum of the group's activations.
template <int Offset>
struct MiddleSum {
  static constexpr bool kWhole = Offset != 0;
  __m512i v;
  HR_INLINE void begin(int32_t activations) { v = _mm512_set1_epi32(-Offset * activations); }
  HR_INLINE void add(Bytes w, Quad x) { v = _mm512_dpbusd_epi32(v, w.v, x.v); }
  HR_INLINE Ints total() const { return {v}; }
};
// Signed weights are offset by 128 to unsigned ones; begin() takes that back.
struct WideSum {
  static constexpr bool kWhole = true;
  __m512i v;
  HR_INLINE void begin(int32_t activations) { v = _mm512_set1_epi32(-128 * activations); }
  HR_INLINE void add(Bytes w, Quad x) {
    __m512i offset = _mm512_xor_si512(w.v, _mm512_set1_epi8(static_cast<char>(0x80)));
    v = _mm512_dpbusd_epi32(v, offset, x.v);
  }
  HR_INLINE Ints total() const { return {v}; }
};

#elif defined(HR_LEVEL_AVX2)

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};
struct Quad {
  __m256i v;
};

HR_INLINE Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE Floats broadcast(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
HR_INLINE Floats load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float *p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
HR_INLINE Floats load_half(const uint16_t *p) {
  const __m128i *at = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
HR_INLINE __m256 brain(__m128i raw) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
HR_INLINE Floats load_brain(const uint16_t *p) {
  const __m128i *at = reinterpret_cast<const __m128i *>(p);
  return {brain(_mm_loadu_si128(at)), brain(_mm_loadu_si128(at + 1))};
}
HR_INLINE Floats mul(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
HR_INLINE Floats add(Floats x, Floats y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
HR_INLINE Floats maximum(Floats x, Floats y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
HR_INLINE Floats absolute(Floats x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// a * b + c, rounded once where the level has fused multiply-adds.
HR_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
HR_INLINE float highest(Floats x) {
  __m256 v = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
HR_INLINE Floats to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// Sixteen values rounded to nearest even, as signed bytes; returns their sum.
HR_INLINE int32_t store_bytes(int8_t *p, Floats x) {
  __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
  __m256i pair = _mm256_add_epi32(a, b);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

HR_INLINE Bytes load_bytes(const uint8_t *p) {
  const __m256i *at = reinterpret_cast<const __m256i *>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
HR_INLINE Bytes low_nibbles(Bytes b) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(b.a, mask), _mm256_and_si256(b.b, mask)};
}
HR_INLINE Bytes high_nibbles(Bytes b) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(b.a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(b.b, 4), mask)};
}
HR_INLINE Quad load_quad(const int8_t *p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return {_mm256_set1_epi32(word)};
}
HR_INLINE __m256 eight_signed(const int8_t *p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
HR_INLINE Floats load_signed(const int8_t *p) { return {eight_signed(p), eight_signed(p + 8)}; }
HR_INLINE Bytes either(Bytes x, Bytes y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
// table[b] for each byte, which is below 16.
HR_INLINE Bytes look_up(const int8_t *table, Bytes b) {
  __m256i sixteen =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
  return {_mm256_shuffle_epi8(sixteen, b.a), _mm256_shuffle_epi8(sixteen, b.b)};
}
// The bits `Mask` of each byte from place `From` on, moved to place `To`.
template <int From, int To, int Mask>
HR_INLINE Bytes moved(Bytes b) {
  const auto one = [](__m256i v) {
    v = From < To ? _mm256_slli_epi16(v, From < To ? To - From : 0)
                  : _mm256_srli_epi16(v, From < To ? 0 : From - To);
    return _mm256_and_si256(v, _mm256_set1_epi8(Mask << To));
  };
  return {one(b.a), one(b.b)};
}

// Makes the sum be taken here and now: compilers put off integer additions until all products are made,
// and those do not fit the registers.
HR_INLINE void stay(__m256i &sum) { __asm__("" : "+x"(sum)); }

// Pair sums in 16 bits: 32 products of at most 15 * 127 spread over two lanes stay below 2^15.
struct NarrowSum {
  static constexpr bool kWhole = false;
  __m256i a, b;
  HR_INLINE void begin(int32_t) { a = b = _mm256_setzero_si256(); }
  HR_INLINE void add(Bytes w, Quad x) {
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.a, x.v));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.b, x.v));
    stay(a);
    stay(b);
  }
  HR_INLINE Ints total() const {
    __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)};
  }
};
// Unsigned weights of up to 6 bits less an offset, which begin() takes off with the sum of the group's
// activations: pairs reach 63 * 127 * 2, below 2^15; their sums need 32 bits.
template <int Offset>
struct MiddleSum {
  static constexpr bool kWhole = Offset != 0;
  __m256i a, b;
  HR_INLINE void begin(int32_t activations) { a = b = _mm256_set1_epi32(-Offset * activations); }
  static HR_INLINE __m256i product(__m256i w, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
  }
  HR_INLINE void add(Bytes w, Quad x) {
    a = _mm256_add_epi32(a, product(w.a, x.v));
    b = _mm256_add_epi32(b, product(w.b, x.v));
    stay(a);
    stay(b);
  }
  HR_INLINE Ints total() const { return {a, b}; }
};
// |weight| times the activation with the weight's sign: pairs reach 128 * 127 * 2, below 2^15.
struct WideSum {
  static constexpr bool kWhole = false;
  __m256i a, b;
  HR_INLINE void begin(int32_t) { a = b = _mm256_setzero_si256(); }
  static HR_INLINE __m256i product(__m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  HR_INLINE void add(Bytes w, Quad x) {
    a = _mm256_add_epi32(a, product(w.a, x.v));
    b = _mm256_add_epi32(b, product(w.b, x.v));
    stay(a);
    stay(b);
  }
  HR_INLINE Ints total() const { return {a, b}; }
};

#else

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

#endif

}  // namespace dot
}  // namespace HR_LEVEL
}  // namespace hr
