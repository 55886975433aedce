// gil.h: Python's lock (the GIL) as one of the locks that clang's analysis follows; see thread_annotations.h.
// Ownership:     none: the lock itself is Python's.
// Thread safety: any thread.
// Cost:          none: no call is made.
//
// Each field that the GIL guards is GUARDED_BY(gil), and a function that needs it is marked REQUIRES(gil). A function
// that waits for a device, a disk or another thread is marked EXCLUDES(gil): a thread that held the GIL there would
// stop every Python thread, and two threads that wait for each other that way would stand still for ever.
#pragma once

#include "system/thread_annotations.h"

namespace torchoffload {

class CAPABILITY("Python's lock") Gil {
 public:
  // The function's caller holds it, but the analysis cannot see that caller: Python itself, or a callback of PyTorch's.
  void assert_held() const ASSERT_CAPABILITY(this) {}
};

inline constexpr Gil gil;

}  // namespace torchoffload
