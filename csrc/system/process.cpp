#include "system/process.h"

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

#ifdef TORCHOFFLOAD_TESTING
std::atomic<int> thread_refusal{0};
#endif

int start_thread(pthread_t& thread, const char* name, void* (*main)(void*), void* argument, size_t stack_bytes) {
#ifdef TORCHOFFLOAD_TESTING
  if (thread_refusal != 0) return thread_refusal;
#endif
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  if (stack_bytes > 0) pthread_attr_setstacksize(&attributes, stack_bytes);
  const SignalBlock no_signals;
  const int error = pthread_create(&thread, &attributes, main, argument);
  pthread_attr_destroy(&attributes);
  if (error == 0) pthread_setname_np(thread, name);
  return error;
}

SignalBlock::SignalBlock() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous_);
}

SignalBlock::~SignalBlock() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

}  // namespace torchoffload
