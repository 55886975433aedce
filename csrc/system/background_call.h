// BackgroundCall: one call that is made on a thread of its own, once.
// Ownership:     owns its thread, and the call's function object.
// Thread safety: every method, any thread. The thread takes no signal and touches no Python.
// Shutdown:      once stop() has returned the call does nothing any more; see Note [No CUDA after main]. In a forked
//                child nothing is begun, and nothing is waited for; see Note [Forked children].
// Not handled:   exceptions of the call: it throws nothing.
#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "system/mutex.h"
#include "system/process.h"

namespace torchoffload {

class BackgroundCall {
 public:
  // `name`: of the thread, 15 characters at most. `call` asks its argument between its parts whether it may_go_on(),
  // and returns if it may not.
  using Function = std::function<void(const BackgroundCall&)>;
  BackgroundCall(std::string name, Function function) : name_(std::move(name)), function_(std::move(function)) {}

  // Waits for the call: for tests, since those of a process are never destroyed.
  ~BackgroundCall();
  BackgroundCall(const BackgroundCall&) = delete;
  BackgroundCall& operator=(const BackgroundCall&) = delete;

  // Begins the call, unless it was begun or stopped before. Returns at once. If no thread can be started, nothing was
  // begun, and a later begin() tries again.
  void begin();

  bool may_go_on() const { return !is_stopped_.load(std::memory_order_acquire); }

  // Blocks until the call that was begun has returned; does not block if none was begun.
  void await_end();

  // From here on nothing is begun. Blocks until the call that was begun has returned, as long as ExitWait allows.
  void stop();

 private:
  static void* thread_main(void* background_call);

  const std::string name_;
  const Function function_;
  const ForkGuard fork_guard_;
  std::atomic<bool> has_begun_ = false;
  std::atomic<bool> is_stopped_ = false;

  Mutex mutex_;  // also held to write the two above
  CondVar ended_;
  bool is_running_ GUARDED_BY(mutex_) = false;
  std::optional<pthread_t> thread_ GUARDED_BY(mutex_);
};

}  // namespace torchoffload
