// Which instruction level this file is being compiled for. CMake compiles each op's source once per
// level, with HR_LEVEL (the namespace) and one of HR_LEVEL_PORTABLE, HR_LEVEL_AVX2, HR_LEVEL_AVX512
// defined. Test these, never __AVX2__ and the like: under HR_EMULATE_AVX512 the avx512 level runs
// through SIMDe on any x86.
#pragma once

#if defined(HR_EMULATE_AVX512) && defined(HR_LEVEL_AVX512)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include "emulate.h"
#elif defined(HR_LEVEL_AVX2) || defined(HR_LEVEL_AVX512)
#include <immintrin.h>
#endif

#if defined(HR_LEVEL_AVX512)
#define HR_LEVEL_NAME "avx512"
#elif defined(HR_LEVEL_AVX2)
#define HR_LEVEL_NAME "avx2"
#else
#define HR_LEVEL_NAME "portable"
#endif

#define HR_INLINE inline __attribute__((always_inline))
