// Operation: one hook call, or the release of one handle, from its first look at the ledger to its last transition.
// Ownership:     memory that the operation gave up is held in ThreadState. It is dropped when the outermost operation
//                ends, after its transitions.
// Thread safety: needs the GIL. Operations of several threads overlap only while one of them is in a BlockingSection.
// Shutdown:      nothing is dropped once the interpreter goes down; see Note [No CUDA after main].
//
// Note [Dealloc inside an operation]
// Python's garbage collector can run at any Python allocation, also inside pack, and the tensors that an operation
// drops may own Python objects. So a handle can die while an operation is under way. It must not touch a ledger that is
// in the middle of a transition: its release is queued, and is applied when the outermost operation ends.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "device/memory.h"
#include "engine/program.h"

namespace torchoffload {

struct ThreadState;

class Operation {
 public:
  Operation();
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Drops `memory` when the outermost operation ends, once all transitions are made. Never blocks.
  static void drop_later(Memory memory);

  // Drops now what drop_later() was given, if the calling operation is the outermost one. That may run Python code and
  // release other handles, so the ledger must be read again, as after a BlockingSection.
  static void drop_now();

  // Runs `release` at once where no operation is open, else when the outermost one ends. An exception of `release`
  // becomes a warning, because this is called by destructors.
  template <typename Release>
  static void run_or_queue(Release release) {
    if (must_queue()) {
      queue(std::move(release));
    } else {
      const Operation operation;
      run(release);
    }
  }

  // The number of the operation that began last, of all threads. One inside of another has none of its own.
  static uint64_t latest();

  // True once the interpreter is going down: from then on device memory is leaked, and not freed.
  static bool is_shut_down();
  static void shut_down();

 private:
  friend class BlockingSection;
  template <typename Release>
  static void run(const Release& release) {
    try {
      release();
    } catch (const std::exception& error) {
      program::warn(std::string("torchoffload: a saved tensor could not be released: ") + error.what());
    }
  }
  // Is an operation of this thread open?
  static bool must_queue();
  static void queue(std::function<void()> release);
  // Drops the memory and makes the releases that were put off, until none is left. May run Python code and may block.
  static void finish_outermost(ThreadState& now);

  ThreadState& now_;
};

// Note [Threads at exit]
// Once the interpreter goes down, Python ends a thread that asks for the GIL by unwinding its stack. Here the stack
// leads through a destructor, where unwinding would call std::terminate. Such a thread is stopped for the rest of the
// process instead, as Python itself does from 3.14 on.

// Releases the GIL for calls that can block, such as growing pinned memory or waiting for a disk. First drops what the
// operation gave up. Operations of other threads may run meanwhile, so the ledger must be read again afterwards.
class BlockingSection {
 public:
  BlockingSection();
  ~BlockingSection();
  BlockingSection(const BlockingSection&) = delete;
  BlockingSection& operator=(const BlockingSection&) = delete;

 private:
  ThreadState& now_;
  int depth_;
  void* thread_state_;
};

// Takes the GIL for its scope, on a thread that may or may not hold it, such as one of autograd's.
class WithGil {
 public:
  WithGil();
  ~WithGil();
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  int state_;  // a PyGILState_STATE
};

}  // namespace torchoffload
