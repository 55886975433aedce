// host_wait: how a thread of the program waits for a disk, and how the process's end waits for threads that may hang.
// Ownership:     a HostWait is one wait.
// Thread safety: a HostWait belongs to the thread that waits, which does not hold the GIL. The functions: any thread.
// Failures:      a wait that the user interrupts throws WaitAbandoned. The transfer that it waited for goes on.
// Cost:          none if the condition holds at once; else the thread wakes ten times a second.
//
// A disk that stops answering (a network's, or one that fails) would otherwise block the program without a word, and
// Ctrl-C would do nothing: Python runs its handler only once the call that blocks has returned.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>

#include "system/mutex.h"

namespace torchoffload {

struct WaitAbandoned : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct WaitLimits {
  std::chrono::milliseconds slice{100};          // after so long the waiting thread looks whether it is interrupted
  std::chrono::milliseconds until_told{30'000};  // after so long standard error is told of the wait
  std::chrono::milliseconds at_exit{30'000};     // so long in all the end of the process waits
};
#ifdef TORCHOFFLOAD_TESTING
extern WaitLimits wait_limits;
#else
inline constexpr WaitLimits wait_limits;
#endif

// Has the user interrupted the calling thread? Asked with no lock held. It neither runs Python code nor takes the
// interruption away from Python. Null: nothing interrupts.
using AskInterrupted = bool (*)();
void set_ask_interrupted(AskInterrupted ask);

// Writes a line to standard error. It is no Python warning, because the thread that waits may run no Python code.
void tell_on_stderr(const std::string& text);

class HostWait {
 public:
  // Blocks until `is_done` returns true. `what` names the thing that is waited for, as in "a read of the disk". Both
  // are called with the lock held, but the analysis cannot connect this lock with a lambda's own annotation.
  template <typename IsDone, typename What>
  static void until(Mutex& mutex, CondVar& changed, const IsDone& is_done, const What& what)
      REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    HostWait wait;
    auto slice_end = std::chrono::steady_clock::now() + wait_limits.slice;
    while (!is_done()) {
      if (changed.wait_until(mutex, slice_end) || is_done()) continue;
      const std::string told = wait.is_to_be_told() ? what() : std::string();
      const bool is_abandoned = wait.look_around_without(mutex, told);
      if (is_done()) return;
      if (is_abandoned) throw WaitAbandoned("torchoffload: a wait for " + std::string(what()) + " was interrupted");
      slice_end = std::chrono::steady_clock::now() + wait_limits.slice;
    }
  }

 private:
  bool is_to_be_told() const;
  // Returns whether the wait is to be abandoned.
  bool look_around(const std::string& told);
  bool look_around_without(Mutex& mutex, const std::string& told) REQUIRES(mutex) {
    const MutexUnlock unlocked(mutex);
    return look_around(told);
  }

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  bool has_told_ = false;
};

// The end of the process waits for the work under way on its threads, but not for ever: a device or a disk may hang.
// All such waits together take wait_limits.at_exit at most. Returns false, and names the abandoned work on standard
// error, if that time is over.
class ExitWait {
 public:
  template <typename IsDone>
  static bool until(Mutex& mutex, CondVar& changed, const IsDone& is_done, const char* what)
      REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {  // as in HostWait::until
    while (!is_done()) {
      if (changed.wait_until(mutex, deadline()) || is_done()) continue;
      tell(what);
      return false;
    }
    return true;
  }

 private:
  static std::chrono::steady_clock::time_point deadline();
  static void tell(const char* what);
};

}  // namespace torchoffload
