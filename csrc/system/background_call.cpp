#include "system/background_call.h"

#include "system/host_wait.h"

namespace torchoffload {

BackgroundCall::~BackgroundCall() {
  if (fork_guard_.inherited()) return;
  stop();
  if (thread_) pthread_join(*thread_, nullptr);
}

void BackgroundCall::begin() {
  if (has_begun_.load(std::memory_order_acquire) || fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  if (has_begun_.load(std::memory_order_relaxed) || !may_go_on()) return;
  pthread_t thread;
  if (start_thread(thread, name_.c_str(), thread_main, this) != 0) return;
  thread_ = thread;
  is_running_ = true;
  has_begun_.store(true, std::memory_order_release);
}

void* BackgroundCall::thread_main(void* background_call) {
  auto& self = *static_cast<BackgroundCall*>(background_call);
  self.function_(self);
  const MutexLock lock(self.mutex_);
  self.is_running_ = false;
  self.ended_.notify_all();
  return nullptr;
}

void BackgroundCall::await_end() {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  while (is_running_) ended_.wait(mutex_);
}

void BackgroundCall::stop() {
  if (fork_guard_.inherited()) return;
  {
    const MutexLock lock(mutex_);
    is_stopped_.store(true, std::memory_order_release);
  }
  const MutexLock lock(mutex_);
  ExitWait::until(
      mutex_, ended_, [&]() REQUIRES(mutex_) { return !is_running_; }, ("the thread '" + name_ + "'").c_str());
}

}  // namespace torchoffload
