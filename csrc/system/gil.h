// gil.h: Python's lock (the GIL) as one of the locks that clang's analysis follows; see thread_annotations.h.
// Ownership:     none: the lock itself is Python's.
// Thread safety: any thread.
// Cost:          none: no call is made but in the test build, which asks Python whether the GIL is held.
//
// Each field that the GIL guards is GUARDED_BY(gil), and a function that needs it is marked REQUIRES(gil). A function
// that waits for a device, a disk or another thread is marked EXCLUDES(gil): a thread that held the GIL there would
// stop every Python thread, and two threads that wait for each other that way would stand still for ever.
#pragma once

#ifdef TORCHOFFLOAD_TESTING
#include <cstdio>
#include <cstdlib>
#endif

#include "system/thread_annotations.h"

namespace torchoffload {

#ifdef TORCHOFFLOAD_TESTING
// Programs that have no Python leave it null.
inline bool (*ask_whether_gil_is_held)() = nullptr;
#endif

class CAPABILITY("Python's lock") Gil {
 public:
  // The function's caller holds it, but the analysis cannot see that caller: Python itself, or a callback of PyTorch's.
  void assert_held() const ASSERT_CAPABILITY(this) {
#ifdef TORCHOFFLOAD_TESTING
    if (ask_whether_gil_is_held == nullptr || ask_whether_gil_is_held()) return;
    (void)std::fputs("torchoffload: the GIL is not held by a function that needs it\n", stderr);
    std::abort();
#endif
  }
};

inline constexpr Gil gil;

}  // namespace torchoffload
