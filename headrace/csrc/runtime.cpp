#include <algorithm>
#include <chrono>

#include "memory.h"
#include "program.h"

namespace hr {
namespace {
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace

void Program::add(std::unique_ptr<Instruction> instruction) {
  instructions_.push_back(std::move(instruction));
}

void Program::add(std::vector<std::unique_ptr<Instruction>> instructions) {
  for (auto &instruction : instructions) add(std::move(instruction));
}

size_t Program::scratch_bytes() const {
  size_t bytes = 0;
  for (const auto &instruction : instructions_) bytes = std::max(bytes, instruction->scratch_bytes());
  return round_up(bytes, 64);
}

size_t Program::owned_bytes() const {
  size_t bytes = 0;
  for (const auto &instruction : instructions_) bytes += instruction->owned_bytes();
  return bytes;
}

void Program::bind(Pool *pool, uint8_t *scratch) {
  pool_ = pool;
  scratch_ = scratch;
  scratch_bytes_ = scratch_bytes();
  claims_.reset(new Claims(pool->threads()));
  barrier_.reset(new Barrier(pool->threads()));
}

// `seconds` [instructions], or null, receives the time of each instruction.
void Program::run_range(const Step &step, size_t begin, size_t end, double *seconds) {
  // Every thread skips the same empty instructions, so no barrier is spent on them.
  auto skip = [&](size_t i, int32_t *pieces) {
    for (*pieces = 0; i < end; ++i)
      if ((*pieces = instructions_[i]->pieces(step)) > 0) break;
    return i;
  };
  if (pool_->threads() == 1) {
    Scratch scratch{scratch_, scratch_bytes_};
    int32_t pieces;
    for (size_t i = skip(begin, &pieces); i < end; i = skip(i + 1, &pieces)) {
      double start = seconds ? now() : 0;
      for (int32_t piece = 0; piece < pieces; ++piece) instructions_[i]->run(step, piece, scratch);
      if (seconds) seconds[i] = now() - start;
    }
    return;
  }
  int32_t first_pieces;
  size_t first = skip(begin, &first_pieces);
  if (first == end) return;
  claims_->prepare(first_pieces);
  pool_->run([&](int thread) {
    Scratch scratch{scratch_ + scratch_bytes_ * static_cast<size_t>(thread), scratch_bytes_};
    for (size_t i = first; i < end;) {
      double start = seconds && thread == 0 ? now() : 0;
      const Instruction &instruction = *instructions_[i];
      for (int32_t piece; (piece = claims_->next(thread)) >= 0;) instruction.run(step, piece, scratch);
      int32_t pieces;
      size_t following = skip(i + 1, &pieces);
      // The end of the region is the last barrier.
      if (following < end) barrier_->arrive([&] { claims_->prepare(pieces); });
      if (seconds && thread == 0) seconds[i] = now() - start;
      i = following;
    }
  });
}

void Program::run(const Step &step, Part part) {
  size_t begin = part == Part::sample ? forward_ : 0;
  size_t end = part == Part::forward ? forward_ : instructions_.size();
  run_range(step, begin, end, nullptr);
}

std::vector<Timing> Program::profile(const Step &step) {
  std::vector<double> seconds(instructions_.size(), 0.0);
  run_range(step, 0, instructions_.size(), seconds.data());
  std::vector<Timing> timings;
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const Instruction &instruction = *instructions_[i];
    if (instruction.pieces(step) > 0)
      timings.push_back({&instruction, seconds[i], instruction.bytes(step), instruction.flops(step)});
  }
  return timings;
}

}  // namespace hr
