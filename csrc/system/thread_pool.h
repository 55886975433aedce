// ThreadPool: a few threads that make the pool's call, once for each submit().
// Ownership:     owns its threads. The pool's owner keeps the list of the work for the calls.
// Thread safety: every method, any thread. The threads take no signal and touch no Python.
// Failures:      reserve() throws NoThread. The call itself throws nothing.
// Shutdown:      leaked on purpose with its owner; see Note [No CUDA after main]. In a forked child nothing is
//                submitted; see Note [Forked children].
#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "system/mutex.h"
#include "system/process.h"

namespace torchoffload {

struct NoThread : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ThreadPool {
 public:
  // `name`: of the threads, 15 characters at most. They start with the first call, also after end_idle_threads().
  ThreadPool(std::string name, unsigned thread_count, std::function<void()> call);

  // Waits for the calls, and ends the threads.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // There is a thread for a call, until submit() has it made. In between, the caller lists the work, so that no thread
  // is woken while the list is locked. Throws NoThread if none can be started; the next call tries again. Waits while
  // threads are being ended, which depends on no call.
  void reserve() EXCLUDES(mutex_);
  // One of the threads makes a call that was reserved, soon.
  void submit() EXCLUDES(mutex_);

  // Ends the threads if no call is reserved, waits or runs; else does nothing. Blocks until they are gone.
  void end_idle_threads() EXCLUDES(mutex_);

 private:
  void start_threads() REQUIRES(mutex_);
  static void* thread_main(void* pool);
  void work();

  const std::string name_;
  const unsigned thread_count_;
  const std::function<void()> call_;
  const ForkGuard fork_guard_;

  Mutex mutex_;
  CondVar submitted_or_ending_;
  CondVar threads_ended_;
  uint64_t reserved_count_ GUARDED_BY(mutex_) = 0;
  uint64_t waiting_count_ GUARDED_BY(mutex_) = 0;  // calls that no thread has begun
  unsigned running_count_ GUARDED_BY(mutex_) = 0;
  std::vector<pthread_t> threads_ GUARDED_BY(mutex_);
  bool are_threads_ending_ GUARDED_BY(mutex_) = false;  // then nothing is submitted
};

}  // namespace torchoffload
