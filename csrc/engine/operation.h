// Operation: one hook call, or the release of one handle, from its first look at the ledger to its last transition.
// Ownership:     memory that the thread drops meanwhile is held in ThreadState. It is dropped when the outermost
//                operation ends, after its transitions.
// Thread safety: needs the GIL. Operations of several threads overlap only while one of them is in a BlockingSection.
// Shutdown:      nothing is dropped once the interpreter goes down; see Note [No CUDA after main].
//
// Note [What may run Python]
// Inside of an operation the ledger, the windows and the lists of a thread are in the middle of transitions. Python
// code that ran there could enter contexts, save, run backwards, or call trim(), and so change all of them under a
// function that goes through them. Memory that is dropped may run any Python code: finalizers of tensors and storages,
// and deleters of memory that came from outside. So the engine drops none inside of an operation: each share in memory
// that the thread drops is put off (PutOffDrops), whichever function drops it. Code of others may run in these places
// alone:
// - The end of the outermost operation, and drop_now(). Nothing is held there: no reference, no iterator, no number
//   that was read before. drop_now() is called when the operation is about to allocate or to block for long, so that
//   the memory that was put off is freed in time: between two copies of a flush, before an unpack starts reloads, when
//   device memory is short, and before a tape is closed.
// - A BlockingSection. It runs no Python code of this thread, but other threads run meanwhile, with operations on the
//   same engine and the same context: each value that was read before has to be read again. Python code of this thread
//   runs there only if a call inside of the section runs some itself, such as an observer of PyTorch's allocator.
// - In autograd/: each function that makes Python objects, since that may run the garbage collector, and the methods of
//   wrapper subclasses. No function of the engine is on the stack there.
// An engine function does none of these, unless its comment says that it may block.
//
// Note [Dealloc inside an operation]
// A handle can die while an operation is under way, in a place that runs code of others (see above). It must not touch
// a ledger that is in the middle of a transition: its release is queued, and is applied when the outermost operation
// ends.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/program.h"
#include "system/gil.h"

namespace torchoffload {

class PutOffDrops;
struct ThreadState;

class Operation {
 public:
  Operation() REQUIRES(gil);
  ~Operation() REQUIRES(gil);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Drops now the memory that was put off, if the calling operation is the outermost one. That may run any Python code
  // and block, so call it only while nothing is held; see Note [What may run Python]. Returns whether there was
  // anything to drop: if so, everything has to be read again, the thread's pending copies included.
  static bool drop_now() REQUIRES(gil);

  // Runs `release` at once if no operation is open, else when the outermost one ends. An exception of `release` becomes
  // a warning, because this is called by destructors.
  template <typename Release>
  static void run_or_queue(Release release) REQUIRES(gil) {
    if (must_queue()) {
      queue(std::move(release));
    } else {
      const Operation operation;
      run(release);
    }
  }

  // The number of the operation that began last, of all threads. One inside of another has none of its own.
  static uint64_t latest() REQUIRES(gil);

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
  static bool must_queue() REQUIRES(gil);
  static void queue(std::function<void()> release) REQUIRES(gil);
  // Drops the memory and makes the releases that were put off, until none is left. May run Python code and may block.
  // Returns whether there was anything.
  static bool finish_outermost(ThreadState& now) REQUIRES(gil);

  ThreadState& now_;
  const bool is_inside_another_;  // also one that is in a BlockingSection
};

// Note [Threads at exit]
// Once the interpreter goes down, Python ends a thread that asks for the GIL by unwinding its stack. Here the stack
// leads through destructors, and unwinding one would call std::terminate. Such a thread is stopped for the rest of the
// process instead, as Python itself does from 3.14 on. So the GIL is taken by take_gil_back() and WithGil alone. Saved
// values that are dropped by then are leaked, without asking for the GIL. PyTorch's own calls do not stop a thread: one
// of autograd's that drops a graph task as the interpreter goes down aborts the process, with hooks of ours or without.

// Takes the GIL again that PyEval_SaveThread() released.
void take_gil_back(void* thread_state) noexcept;

// Releases the GIL for calls that can block, such as growing pinned memory or waiting for a disk. Operations of other
// threads may run meanwhile, so the ledger must be read again afterwards. Drops no memory that was put off before.
// Memory that is dropped inside, such as a buffer that was just allocated, is freed at once.
class SCOPED_CAPABILITY BlockingSection {
 public:
  BlockingSection() RELEASE(gil);
  ~BlockingSection() RELEASE();
  BlockingSection(const BlockingSection&) = delete;
  BlockingSection& operator=(const BlockingSection&) = delete;

 private:
  ThreadState& now_;
  int depth_;
  PutOffDrops* put_off_;
  void* thread_state_;
};

// Has the user pressed Ctrl-C while the calling thread waits without the GIL? Always false on threads that run no
// signal handlers of Python. Runs no Python code, and Python still handles the interruption later. See
// system/host_wait.h.
bool is_interrupted() EXCLUDES(gil);

// Takes the GIL for its scope, on a thread that may or may not hold it, such as one of autograd's.
class SCOPED_CAPABILITY WithGil {
 public:
  WithGil() ACQUIRE(gil);
  ~WithGil() RELEASE();
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  int state_;  // a PyGILState_STATE
};

}  // namespace torchoffload
