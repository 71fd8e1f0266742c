#include "levels.h"

#include <stdexcept>

namespace hr {
namespace {

bool always() { return true; }

#if defined(HR_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
#if defined(HR_EMULATE_AVX512)
  return has_avx2();
#else
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#endif
}
#endif

#define HR_LEVEL_ENTRY(level, runs)                                                              \
  {                                                                                              \
    #level, runs, level::make_norm, level::make_gated, level::make_rope_store,                   \
        level::attention_shared_bytes, level::make_attention, level::make_sample,                \
        level::make_copy, level::make_linear, level::make_embed, level::limits                   \
  }

// Best first; an emulated level is never the best.
const Level kLevels[] = {
#if defined(HR_X86) && !defined(HR_EMULATE_AVX512)
    HR_LEVEL_ENTRY(avx512, has_avx512),
#endif
#if defined(HR_X86)
    HR_LEVEL_ENTRY(avx2, has_avx2),
#endif
    HR_LEVEL_ENTRY(portable, always),
#if defined(HR_EMULATE_AVX512)
    HR_LEVEL_ENTRY(avx512, has_avx512),
#endif
};

}  // namespace

std::vector<const Level *> levels() {
  std::vector<const Level *> found;
  for (const Level &level : kLevels)
    if (level.runs_here()) found.push_back(&level);
  return found;
}

const Level &find_level(const std::string &name) {
  std::string names;
  for (const Level *level : levels()) {
    if (name == level->name) return *level;
    names += names.empty() ? level->name : std::string(", ") + level->name;
  }
  throw std::invalid_argument("this machine runs the levels " + names + ", not " + name);
}

}  // namespace hr
