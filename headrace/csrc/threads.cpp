#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

namespace hr {
namespace {

// Spins before an idle thread starts to give its core away: about 20 to 50 us.
constexpr int kSpins = 1000;
// Time that a worker stays ready (yielding) after a job before it sleeps: longer than the usual gap
// between two steps, short enough that an idle engine costs nothing.
constexpr auto kReady = std::chrono::microseconds(1000);

constexpr int kFieldBits = 20;
constexpr uint64_t kField = (uint64_t{1} << kFieldBits) - 1;

int32_t next_piece(uint64_t ticket) { return static_cast<int32_t>(ticket & kField); }
int32_t pieces_of(uint64_t ticket) { return static_cast<int32_t>(ticket >> kFieldBits & kField); }
int32_t index_of(uint64_t ticket) { return static_cast<int32_t>(ticket >> 2 * kFieldBits); }

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void pin(pthread_t thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

class Each final : public Job {
 public:
  Each(int32_t pieces, const std::function<void(int32_t)> &body) : pieces_(pieces), body_(body) {}
  void run(int32_t, int32_t piece, int) override { body_(piece); }
  Stage next(int32_t index) override { return {0, index < 0 ? pieces_ : 0}; }

 private:
  int32_t pieces_;
  const std::function<void(int32_t)> &body_;
};

}  // namespace

Pool::Pool(int threads, const std::vector<int> &cpus) : threads_(threads) {
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
  if (cpus.empty()) return;
  pin(pthread_self(), cpus[0]);
  for (size_t t = 1; t < static_cast<size_t>(threads); ++t)
    pin(workers_[t - 1].native_handle(), cpus[t % cpus.size()]);
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread &worker : workers_) worker.join();
}

void Pool::run(Job &job) {
  if (threads_ == 1) {
    for (Stage stage = job.next(-1); stage.pieces > 0; stage = job.next(stage.index))
      for (int32_t piece = 0; piece < stage.pieces; ++piece) job.run(stage.index, piece, 0);
    return;
  }
  job_ = &job;
  Stage stage = next(-1, 0);
  if (stage.pieces == 0) return;
  finished_.store(false);
  open(stage);
  if (sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  for (int idle = 0; !finished_.load(std::memory_order_acquire);) {
    if (take(0)) {
      idle = 0;
    } else if (++idle < kSpins) {
      relax();
    } else {
      sched_yield();
    }
  }
}

Stage Pool::next(int32_t index, int thread) {
  Stage stage = job_->next(index);
  for (; stage.pieces == 1; stage = job_->next(stage.index)) job_->run(stage.index, 0, thread);
  return stage;
}

void Pool::open(Stage stage) {
  uint64_t index = static_cast<uint64_t>(stage.index), pieces = static_cast<uint64_t>(stage.pieces);
  ticket_.store(index << 2 * kFieldBits | pieces << kFieldBits);
}

bool Pool::take(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  int32_t first, count;
  do {
    first = next_piece(ticket);
    int32_t left = pieces_of(ticket) - first;
    if (left <= 0) return false;
    // A share of what is left: neighbours in memory stay with one thread, the ends even out.
    count = std::max(1, left / (2 * threads_));
  } while (!ticket_.compare_exchange_weak(ticket, ticket + static_cast<uint64_t>(count),
                                          std::memory_order_acq_rel, std::memory_order_acquire));
  int32_t index = index_of(ticket);
  for (int32_t piece = first; piece < first + count; ++piece) job_->run(index, piece, thread);
  if (done_.fetch_add(count, std::memory_order_acq_rel) + count == pieces_of(ticket)) {
    done_.store(0, std::memory_order_relaxed);
    Stage stage = next(index, thread);
    if (stage.pieces > 0) {
      open(stage);
    } else {
      finished_.store(true, std::memory_order_release);
    }
  }
  return true;
}

void Pool::each(int32_t pieces, const std::function<void(int32_t)> &body) {
  Each job(pieces, body);
  run(job);
}

void Pool::together(const std::function<void(int)> &body) {
  std::atomic<int> arrived{0};
  // Each piece waits for all to have begun, so no thread can take two.
  each(threads_, [&](int32_t piece) {
    arrived.fetch_add(1);
    while (arrived.load() < threads_) sched_yield();
    body(piece);
  });
}

void Pool::work(int thread) {
  int idle = 0;
  std::chrono::steady_clock::time_point deadline;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (take(thread)) {
      idle = 0;
      continue;
    }
    if (++idle < kSpins) {
      relax();
      continue;
    }
    // Within a job a worker stays awake: the next stage is microseconds away, waking takes longer.
    if (!finished_.load(std::memory_order_relaxed)) {
      idle = kSpins - 1;
      sched_yield();
      continue;
    }
    if (idle == kSpins) deadline = std::chrono::steady_clock::now() + kReady;
    if (std::chrono::steady_clock::now() < deadline) {
      sched_yield();
      continue;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return stop_.load() || !finished_.load(); });
    sleeping_.fetch_sub(1);
    idle = 0;
  }
}

}  // namespace hr
