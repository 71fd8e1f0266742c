// What the files of linear share within a level.
#pragma once
#include "level.h"
#include "linear.h"

namespace hr {
namespace HR_LEVEL {

// Rows [first, first + rows) of a linear times panels [panel, panel + panels) of one segment.
struct Tile {
  const LinearArgs *args;
  const Segment *segment;
  const int32_t *gather;  // logits row -> token row, or null
  int32_t first, rows;
  int32_t panel, panels;
};

void run_quantized(const Tile &tile, uint8_t *scratch);
void run_float(const Tile &tile);
// Room for one opened panel of a quantized segment.
size_t opened_bytes(int32_t groups);

std::unique_ptr<Instruction> make_quantize(const LinearArgs &args);

// x[i] = cap * tanh(x[i] / cap)
void softcap(float *x, int32_t n, float cap);

}  // namespace HR_LEVEL
}  // namespace hr
