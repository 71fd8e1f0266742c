// The instruction levels built into this module, and which of them this machine runs.
#pragma once
#include <string>
#include <vector>

#include "linear.h"
#include "runtime.h"

namespace hr {

using Made = std::unique_ptr<Instruction>;
using MadeList = std::vector<std::unique_ptr<Instruction>>;

// The makers of one level.
struct Level {
  const char *name;
  bool (*runs_here)();
  Made (*make_norm)(const NormArgs &);
  Made (*make_gated)(const GatedArgs &);
  Made (*make_rope_store)(const RopeStoreArgs &);
  size_t (*attention_shared_bytes)(const AttentionArgs &);
  MadeList (*make_attention)(const AttentionArgs &);
  MadeList (*make_sample)(const SampleArgs &);
  Made (*make_copy)(const CopyArgs &);
  MadeList (*make_linear)(const LinearArgs &);
  Made (*make_embed)(const EmbedArgs &);
  const Limits &(*limits)();
};

// The levels of this module that this machine runs, best first.
std::vector<const Level *> levels();

// The level of that name. Throws std::invalid_argument where it is not built or does not run here.
const Level &find_level(const std::string &name);

}  // namespace hr
