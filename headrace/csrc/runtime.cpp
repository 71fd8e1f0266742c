#include <algorithm>
#include <chrono>

#include "memory.h"
#include "program.h"

namespace hr {
namespace {
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One step: a stage for each instruction that has work.
class Run final : public Job {
 public:
  // seconds: [instructions] to receive the time of each, or null.
  Run(const std::vector<std::unique_ptr<Instruction>> &instructions, const Step &step, size_t begin,
      size_t end, uint8_t *scratch, size_t scratch_bytes, double *seconds)
      : instructions_(instructions),
        step_(step),
        begin_(begin),
        end_(end),
        scratch_(scratch),
        scratch_bytes_(scratch_bytes),
        seconds_(seconds) {}

  void run(int32_t index, int32_t piece, int thread) override {
    Scratch scratch{scratch_ + scratch_bytes_ * static_cast<size_t>(thread), scratch_bytes_};
    instructions_[static_cast<size_t>(index)]->run(step_, piece, scratch);
  }

  Stage next(int32_t index) override {
    if (seconds_) {
      double time = now();
      if (index >= 0) seconds_[index] = time - opened_;
      opened_ = time;
    }
    for (size_t i = index < 0 ? begin_ : static_cast<size_t>(index) + 1; i < end_; ++i) {
      int32_t pieces = instructions_[i]->pieces(step_);
      if (pieces > 0) return {static_cast<int32_t>(i), pieces};
    }
    return {0, 0};
  }

 private:
  const std::vector<std::unique_ptr<Instruction>> &instructions_;
  const Step &step_;
  const size_t begin_, end_;
  uint8_t *const scratch_;
  const size_t scratch_bytes_;
  double *const seconds_;
  double opened_ = 0;
};

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
}

void Program::run(const Step &step, Part part) {
  size_t begin = part == Part::sample ? forward_ : 0;
  size_t end = part == Part::forward ? forward_ : instructions_.size();
  Run run(instructions_, step, begin, end, scratch_, scratch_bytes_, nullptr);
  pool_->run(run);
}

std::vector<Timing> Program::profile(const Step &step) {
  std::vector<double> seconds(instructions_.size(), 0.0);
  Run run(instructions_, step, 0, instructions_.size(), scratch_, scratch_bytes_, seconds.data());
  pool_->run(run);
  std::vector<Timing> timings;
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const Instruction &instruction = *instructions_[i];
    if (instruction.pieces(step) > 0)
      timings.push_back({&instruction, seconds[i], instruction.bytes(step), instruction.flops(step)});
  }
  return timings;
}

}  // namespace hr
