#include "system/thread_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torchoffload {
namespace {

constexpr size_t kStackBytes = size_t{1} << 20;  // the threads call read, write and little else

}  // namespace

ThreadPool::ThreadPool(std::string name, unsigned thread_count, std::function<void()> call)
    : name_(std::move(name)), thread_count_(std::max(thread_count, 1U)), call_(std::move(call)) {
  threads_.reserve(thread_count_);
}

ThreadPool::~ThreadPool() {
  if (fork_guard_.inherited()) return;
  std::vector<pthread_t> ending;
  {
    const MutexLock lock(mutex_);
    are_threads_ending_ = true;
    ending.swap(threads_);
  }
  submitted_or_ending_.notify_all();
  for (const pthread_t thread : ending) pthread_join(thread, nullptr);
}

void ThreadPool::reserve() {
  const MutexLock lock(mutex_);
  while (are_threads_ending_) threads_ended_.wait(mutex_);
  if (threads_.empty()) start_threads();
  ++reserved_count_;
}

void ThreadPool::submit() {
  {
    const MutexLock lock(mutex_);
    --reserved_count_;
    ++waiting_count_;
  }
  submitted_or_ending_.notify_one();
}

void ThreadPool::end_idle_threads() {
  if (fork_guard_.inherited()) return;
  std::vector<pthread_t> ending;
  {
    const MutexLock lock(mutex_);
    if (are_threads_ending_ || threads_.empty() || reserved_count_ + waiting_count_ + running_count_ > 0) return;
    are_threads_ending_ = true;
    ending.swap(threads_);
  }
  submitted_or_ending_.notify_all();
  for (const pthread_t thread : ending) pthread_join(thread, nullptr);
  {
    const MutexLock lock(mutex_);
    are_threads_ending_ = false;
    threads_.reserve(thread_count_);
  }
  threads_ended_.notify_all();
}

void ThreadPool::start_threads() {
  int error = 0;
  while (threads_.size() < thread_count_ && error == 0) {
    pthread_t thread;
    error = start_thread(thread, name_.c_str(), thread_main, this, kStackBytes);
    if (error == 0) threads_.push_back(thread);
  }
  // A single thread is enough for correctness.
  if (threads_.empty()) throw NoThread(std::string("cannot start an I/O thread: ") + std::strerror(error));
}

void* ThreadPool::thread_main(void* pool) {
  static_cast<ThreadPool*>(pool)->work();
  return nullptr;
}

void ThreadPool::work() {
  const MutexLock lock(mutex_);
  while (true) {
    while (!are_threads_ending_ && waiting_count_ == 0) submitted_or_ending_.wait(mutex_);
    if (waiting_count_ == 0) return;
    --waiting_count_;
    ++running_count_;
    {
      const MutexUnlock unlocked(mutex_);
      call_();
    }
    --running_count_;
  }
}

}  // namespace torchoffload
