// Persistent threads: the caller and its workers run one parallel region at a time.
//
// Inside a region threads claim pieces of work and meet at barriers. Waiting spins first (a step crosses
// hundreds of barriers, each a microsecond or so), then yields the core, so that a machine with more
// runnable threads than cores keeps moving; between regions the workers go to sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hr {

// Pieces [0, n) handed out to threads. Each thread has a contiguous share, so that it streams through
// adjacent memory, and takes from the others' when its own is done.
class Claims {
 public:
  explicit Claims(int threads);
  // Sets a new range; no thread may be claiming.
  void prepare(int32_t pieces);
  // Next piece for the thread, or -1.
  int32_t next(int thread);

 private:
  struct alignas(64) Share {
    std::atomic<int32_t> next{0};
    int32_t end = 0;
  };
  int threads_;
  std::unique_ptr<Share[]> shares_;
};

// Barrier of all threads of a pool; the last to arrive runs `then` before the others go on.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  template <class Then>
  void arrive(Then then) {
    uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      then();
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      wait(phase);
    }
  }

 private:
  void wait(uint32_t phase) const;
  int threads_;
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

class Pool {
 public:
  // threads: the caller's included. cpus: one per thread to pin to, or empty.
  Pool(int threads, const std::vector<int> &cpus);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return threads_; }
  // Runs body(thread) on every thread, the caller being thread 0. Not re-entrant.
  void run(const std::function<void(int)> &body);
  // Runs body(piece) for every piece in [0, pieces), on all threads.
  void each(int32_t pieces, const std::function<void(int32_t)> &body);

 private:
  void work(int thread);
  int threads_;
  std::vector<std::thread> workers_;
  const std::function<void(int)> *body_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int32_t> running_{0};
  alignas(64) std::atomic<int32_t> sleeping_{0};
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace hr
