// A recorded program: instructions in order, run by one call a step without allocation.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"
#include "threads.h"

namespace hr {

// One instruction of one timed step.
struct Timing {
  const Instruction *instruction;
  double seconds, bytes, flops;
};

class Program {
 public:
  Program() = default;
  Program(const Program &) = delete;
  Program &operator=(const Program &) = delete;
  void add(std::unique_ptr<Instruction> instruction);
  void add(std::vector<std::unique_ptr<Instruction>> instructions);
  // Instructions added from here on belong to the sampling part.
  void begin_sampling() { forward_ = instructions_.size(); }

  // What the threads need besides the arena: scratch for each, and what instructions allocated.
  size_t scratch_bytes() const;  // of one thread
  size_t owned_bytes() const;

  // scratch: [threads][scratch_bytes()], 64-byte aligned.
  void bind(Pool *pool, uint8_t *scratch);

  enum class Part { all, forward, sample };
  void run(const Step &step, Part part);
  // The same, timing each instruction on the calling thread (barriers included).
  std::vector<Timing> profile(const Step &step);

  const std::vector<std::unique_ptr<Instruction>> &instructions() const { return instructions_; }

 private:
  std::vector<std::unique_ptr<Instruction>> instructions_;
  size_t forward_ = 0;
  Pool *pool_ = nullptr;
  uint8_t *scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

}  // namespace hr
