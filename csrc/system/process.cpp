#include "system/process.h"

#include <pthread.h>

#include <atomic>

namespace torchoffload {
namespace {

std::atomic<uint64_t> generation{0};

void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

uint64_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

SignalBlock::SignalBlock() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous_);
}

SignalBlock::~SignalBlock() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

}  // namespace torchoffload
