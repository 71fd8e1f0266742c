// Persistent threads that work through the stages of a job together.
//
// A stage is a number of independent pieces; it ends when all its pieces are done, and whoever finishes
// the last one opens the next stage. Nobody waits for a thread that has nothing in hand: a worker that
// is asleep, or has lost its core to another process, is not missed, the others take its pieces. Idle
// threads spin first (a step crosses hundreds of stages, each a few microseconds), then yield the
// core; between jobs workers sleep after a while.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hr {

// Stage `index` of a job, with `pieces` > 0; 0 pieces say that the job is done.
struct Stage {
  int32_t index, pieces;
};

class Job {
 public:
  virtual ~Job() = default;
  virtual void run(int32_t index, int32_t piece, int thread) = 0;
  // What follows stage `index` (-1: what comes first). Called by one thread at a time.
  virtual Stage next(int32_t index) = 0;
};

class Pool {
 public:
  // threads: the caller's included. cpus: to pin threads to, in turn, or empty.
  Pool(int threads, const std::vector<int> &cpus);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return threads_; }
  // Works through the job on all threads, the caller being thread 0. Not re-entrant.
  void run(Job &job);
  // Runs body(piece) for every piece in [0, pieces), on all threads.
  void each(int32_t pieces, const std::function<void(int32_t)> &body);
  // Runs body(thread) once on every thread, all at the same time.
  void together(const std::function<void(int)> &body);

 private:
  void work(int thread);
  // Takes pieces of the open stage and runs them. False where none are left.
  bool take(int thread);
  // The stage after `index` that has several pieces. Those of one piece that come before it are run
  // here and now: their data is in this core's caches, and handing them over costs more than they do.
  Stage next(int32_t index, int thread);
  void open(Stage stage);

  const int threads_;
  std::vector<std::thread> workers_;
  Job *job_ = nullptr;
  // The open stage: index in the bits from 40 up, pieces in bits 20 to 39, the next piece below. One
  // word, so that a claim is right or fails as a whole, however late a thread comes.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> done_{0};
  std::atomic<bool> finished_{true};
  alignas(64) std::atomic<int32_t> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace hr
