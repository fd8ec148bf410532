// Work shared among XLA's threads and the one that calls.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxinfer {

// Runs work(0) ... work(num_tasks - 1), each once, and returns when all are done. The calling thread takes
// tasks too, so that it waits for no thread that has not begun one.
template <typename Work>
void ParallelFor(xla::ffi::ThreadPool threads, int64_t num_tasks, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto progress = std::make_shared<Progress>();
  // A thread that comes too late finds no task, and does not touch `work`, which may be gone.
  auto take_tasks = [progress, num_tasks, &work] {
    for (int64_t task; (task = progress->next.fetch_add(1)) < num_tasks;) {
      work(task);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t num_helpers = std::min<int64_t>(threads.num_threads(), num_tasks) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) threads.Schedule(decltype(take_tasks)(take_tasks));
  take_tasks();
  while (progress->done.load(std::memory_order_acquire) < num_tasks) std::this_thread::yield();
}

}  // namespace jaxinfer
