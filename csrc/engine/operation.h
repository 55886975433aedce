// Operation: one hook call, or the death of one handle, from its first look at the ledger to its last transition.
// Ownership:     what the operation gave up is held in ThreadState. It is dropped when the outermost operation ends,
//                after its transitions.
// Thread safety: needs the GIL. Operations of several threads never overlap, but for one that is in a BlockingSection.
// Shutdown:      nothing is dropped once the interpreter goes down; see Note [No CUDA after main].
//
// Note [Dealloc inside an operation]
// The collector can run at any Python allocation, also inside pack, and the tensors that an operation drops may own
// Python objects. A handle that dies then must not touch a ledger that is in the middle of a transition: its release
// is queued here, and applied when the outermost operation ends.
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

  // Drops `memory` once the outermost operation has made its transitions.
  static void drop_later(Memory memory);

  // Drops it now, where the calling operation is the outermost: as in a BlockingSection, the ledger must be read again.
  static void drop_now();

  // Runs `release` at once where no operation is open, else when the outermost ends. What it throws becomes a warning:
  // it stands in a destructor.
  template <typename Release>
  static void run_or_queue(Release release) {
    if (must_queue()) {
      queue(std::move(release));
    } else {
      const Operation operation;
      run(release);
    }
  }

  // True once the interpreter is going down: device memory is leaked, not freed.
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
  static bool must_queue();
  static void queue(std::function<void()> release);
  static void finish_outermost(ThreadState& now);

  ThreadState& now_;
};

// Note [Threads at exit]
// Once the interpreter goes down, Python ends a thread that asks for the GIL, by unwinding its stack: here through a
// destructor, which would call terminate. Such a thread stays where it is for the rest of the process, as Python's own
// do from 3.14 on.

// Releases the GIL, for what can block: growing pinned memory, waiting for a disk. Other threads' operations may run
// meanwhile: what was read of the ledger before must be read again after.
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

}  // namespace torchoffload
