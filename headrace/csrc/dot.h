// Sixteen columns at a time: float lanes, and the integer dot products of quantized weights.
//
// `Bytes` holds 16 columns x 4 consecutive values of K. `NarrowSum` adds up to 32 products of unsigned
// nibbles, `MiddleSum` and `WideSum` any number of products of unsigned 6-bit values and of signed
// bytes, each with activations in [-127, 127]; all are exact. One instruction family per level serves
// any number of rows.
#pragma once
#include "level.h"

#if defined(HR_LEVEL_AVX512)
#include "dot_avx512.h"
#elif defined(HR_LEVEL_AVX2)
#include "dot_avx2.h"
#else
#include "dot_portable.h"
#endif
