// process.h: tells the storage floor whether its process was forked, and keeps signals from its threads.
// Ownership:     one count of forks for the process. A ForkGuard remembers a number, a SignalBlock the mask of before.
// Thread safety: everything here, any thread; a SignalBlock ends on the thread that it was made on.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torchoffload {

// Counts the forks between the program's start and this process.
uint64_t fork_generation();

// Starts a thread that takes no signal. `name`: 15 characters at most. Returns 0, or why not: an errno value.
int start_thread(pthread_t& thread, const char* name, void* (*main)(void*), void* argument, size_t stack_bytes = 0);

#ifdef TORCHOFFLOAD_TESTING
extern std::atomic<int> thread_refusal;  // an errno value that start_thread() returns; 0: threads start
#endif

// Note [Forked children]
// A forked child has a copy of our bookkeeping, but not the resources behind it: pinned memory is not mapped there
// (MADV_DONTFORK), no I/O thread runs, a lock may have been held by a thread that is gone, and a spill file is still
// the parent's: a child that wrote or punched a hole there would change the parent's tensors. So each such object keeps
// a ForkGuard, and asks it before it takes its lock: inherited, it has no room, takes nothing back, and says why.
// Objects that the child makes for itself work as ever.
class ForkGuard {
 public:
  ForkGuard() : born_(fork_generation()) {}
  bool inherited() const { return born_ != fork_generation(); }

 private:
  uint64_t born_;
};

// Blocks all signals in the calling thread while it lives. A thread started meanwhile never takes one: Python's
// handlers run on the program's own threads, and no system call of ours is interrupted.
class SignalBlock {
 public:
  SignalBlock();
  ~SignalBlock();
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t previous_;
};

}  // namespace torchoffload
