// A team of threads that share a kernel's work, and stay awake between the kernels of a step.
//
// XLA's own threads sleep between two of its operations, and take 20 to 35 us to wake up, in which a product
// of one token's size is a tenth done: a step of 30 layers has 150 products.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace jaxinfer {

// Pieces that work is cut into, so that a thread that falls behind is helped.
constexpr int64_t kTasksAThread = 8;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class Team {
 public:
  // The process's only one. It is never destroyed: its threads may run to the process's end.
  static Team& Get() {
    static Team* team = new Team;
    return *team;
  }

  // Runs work(0) ... work(num_tasks - 1), each once, on up to num_threads threads, the caller's among them,
  // and returns when all are done. Each thread has a share of consecutive tasks, which it takes in order, so
  // that what one task fetches ahead is there for the next; whoever is done early helps others. Where the
  // team is busy for another caller, this one works alone.
  template <typename Work>
  void Run(int num_threads, int64_t num_tasks, const Work& work) {
    std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (!alone.owns_lock() || num_threads <= 1 || num_tasks <= 1) {
      for (int64_t task = 0; task < num_tasks; ++task) work(task);
      return;
    }
    num_threads_ = std::min(num_threads, kMaxThreads);
    if (static_cast<int>(helpers_.size()) < num_threads_ - 1) AddHelpers();
    KeepHelpersOffThisProcessor();
    call_ = [](const void* work, int64_t task) { (*static_cast<const Work*>(work))(task); };
    work_ = &work;
    num_tasks_ = num_tasks;
    for (int i = 0; i < num_threads_; ++i) shares_[i].next.store(ShareBegin(i), std::memory_order_relaxed);
    open_.store(true, std::memory_order_release);
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    TakeTasks(0);
    open_.store(false);
    // A helper may have lost its core to another process.
    for (int spins = 0; num_inside_.load() > 0; ++spins) spins < kSpins ? Pause() : std::this_thread::yield();
  }

 private:
  // Whoever waits longer than this leaves its core to others: about 100 us.
  static constexpr int kSpins = 2000;
  static constexpr int kMaxThreads = 256;

  void AddHelpers() {
#if defined(__linux__)
    process_ = getpid();
    avoided_ = -1;
    // Helpers may run where the caller may. With more processors than a cpu_set_t has, where they like.
    if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) CPU_ZERO(&allowed_);
#endif
    while (static_cast<int>(helpers_.size()) < num_threads_ - 1) {
      std::thread helper([this, thread = static_cast<int>(helpers_.size()) + 1] { Help(thread); });
      helpers_.push_back(helper.native_handle());
      helper.detach();
    }
  }

  // Linux leaves a helper and the caller on one processor for 10 or 20 ms, with another idle, and the caller
  // is another of XLA's threads in each step.
  void KeepHelpersOffThisProcessor() {
#if defined(__linux__)
    const int processor = sched_getcpu();
    if (processor == avoided_ || getpid() != process_) return;  // a forked process has no helpers
    avoided_ = processor;
    cpu_set_t others = allowed_;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (const pthread_t helper : helpers_) pthread_setaffinity_np(helper, sizeof others, &others);
#endif
  }

  [[noreturn]] void Help(int thread) {
    for (uint32_t seen = 0;;) {
      for (int i = 0; i < kSpins && job_.load(std::memory_order_acquire) == seen; ++i) Pause();
      job_.wait(seen, std::memory_order_acquire);
      seen = job_.load(std::memory_order_acquire);
      // Whoever is inside before the caller closes the job is waited for; who comes later finds it closed.
      num_inside_.fetch_add(1);
      if (open_.load()) TakeTasks(thread);
      num_inside_.fetch_sub(1);
    }
  }

  int64_t ShareBegin(int share) const { return num_tasks_ * share / num_threads_; }

  // Those of the thread's own share, then those left of the others'.
  void TakeTasks(int thread) {
    for (int i = 0; i < num_threads_; ++i) {
      const int share = (thread + i) % num_threads_;
      const int64_t end = ShareBegin(share + 1);
      for (int64_t task; (task = shares_[share].next.fetch_add(1, std::memory_order_relaxed)) < end;)
        call_(work_, task);
    }
  }

  // A line of the cache each.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
  };

  std::mutex busy_;
  std::vector<std::thread::native_handle_type> helpers_;
#if defined(__linux__)
  pid_t process_ = 0;
  cpu_set_t allowed_;
  int avoided_ = -1;
#endif
  void (*call_)(const void*, int64_t) = nullptr;
  const void* work_ = nullptr;
  int64_t num_tasks_ = 0;
  int num_threads_ = 1;
  Share shares_[kMaxThreads];
  std::atomic<int> num_inside_{0};
  std::atomic<bool> open_{false};
  std::atomic<uint32_t> job_{0};
};

}  // namespace jaxinfer
