#include "threads.h"

#include <sched.h>

#include <chrono>

namespace hr {
namespace {

// Spins before a waiting thread starts to give its core away: about 20 to 50 us.
constexpr int kSpins = 1000;
// Time that an idle worker stays ready (yielding) before it sleeps: longer than the usual gap between
// two steps, short enough that an idle engine costs nothing.
constexpr auto kReady = std::chrono::microseconds(300);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void pin(std::thread::native_handle_type thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

}  // namespace

Claims::Claims(int threads) : threads_(threads), shares_(new Share[static_cast<size_t>(threads)]) {}

void Claims::prepare(int32_t pieces) {
  for (int t = 0; t < threads_; ++t) {
    int64_t begin = static_cast<int64_t>(pieces) * t / threads_;
    int64_t end = static_cast<int64_t>(pieces) * (t + 1) / threads_;
    shares_[t].next.store(static_cast<int32_t>(begin), std::memory_order_relaxed);
    shares_[t].end = static_cast<int32_t>(end);
  }
}

int32_t Claims::next(int thread) {
  for (int i = 0; i < threads_; ++i) {
    int owner = thread + i;
    if (owner >= threads_) owner -= threads_;
    Share &share = shares_[owner];
    if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
    int32_t piece = share.next.fetch_add(1, std::memory_order_relaxed);
    if (piece < share.end) return piece;
  }
  return -1;
}

void Barrier::wait(uint32_t phase) const {
  int spins = 0;
  while (phase_.load(std::memory_order_acquire) == phase) {
    if (++spins < kSpins) {
      relax();
    } else {
      sched_yield();
    }
  }
}

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
    stop_ = true;
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread &worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)> &body) {
  if (threads_ == 1) {
    body(0);
    return;
  }
  body_ = &body;
  running_.store(threads_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1);
  if (sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  body(0);
  int spins = 0;
  while (running_.load(std::memory_order_acquire) != 0) {
    if (++spins < kSpins) {
      relax();
    } else {
      sched_yield();
    }
  }
}

void Pool::each(int32_t pieces, const std::function<void(int32_t)> &body) {
  Claims claims(threads_);
  claims.prepare(pieces);
  run([&](int thread) {
    for (int32_t piece; (piece = claims.next(thread)) >= 0;) body(piece);
  });
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    int spins = 0;
    std::chrono::steady_clock::time_point deadline;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        relax();
        continue;
      }
      if (spins == kSpins) deadline = std::chrono::steady_clock::now() + kReady;
      if (std::chrono::steady_clock::now() < deadline) {
        sched_yield();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return epoch_.load() != seen; });
      sleeping_.fetch_sub(1);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_) return;
    (*body_)(thread);
    running_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace hr
