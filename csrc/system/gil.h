// gil.h: Python's lock (the GIL) as one of the locks that clang's analysis follows; see thread_annotations.h.
// Ownership:     none: the lock itself is Python's.
// Thread safety: any thread.
// Cost:          none: no call is made.
//
// What the GIL guards is GUARDED_BY(gil), and a function that needs it is marked REQUIRES(gil). One that waits for a
// device, a disk or another thread is marked EXCLUDES(gil): whoever holds the GIL there would stop every Python thread,
// and two threads that wait for each other that way would stand still for ever.
#pragma once

#include "system/thread_annotations.h"

namespace torchoffload {

class CAPABILITY("Python's lock") Gil {
 public:
  // What calls the function holds it, which the analysis cannot see: Python itself, and PyTorch's callbacks.
  void assert_held() const ASSERT_CAPABILITY(this) {}
};

inline constexpr Gil gil;

}  // namespace torchoffload
