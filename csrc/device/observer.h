// Observer: is told of operators' accesses that the engine saw, which no copy and no wait shows. Only the test build
// listens: the simulated device, to check that every access is ordered, and the log of the seam's calls. A part of a
// Backend.
// Ownership:     borrowed by its backend; it lives for the process.
// Thread safety: every method, any thread.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace torchoffload {

class Observer {
 public:
  virtual ~Observer() = default;

  // The operator that was packing `nbytes` at `address` on `stream` may write it until the calling thread's autograd
  // sequence number is no longer `sequence_number`.
  virtual void saw_pack(const void* /*address*/, uint64_t /*nbytes*/, StreamId /*stream*/,
                        uint64_t /*sequence_number*/) {}

  // A consumer on `stream` was handed the bytes at `address`.
  virtual void saw_unpack(const void* /*address*/, uint64_t /*nbytes*/, StreamId /*stream*/) {}

  // The store had to grow before a save's copy could be enqueued.
  virtual void saw_growth() {}

  // The calling thread is inside no operator any more (a context's exit).
  virtual void saw_operators_end() {}
};

// An observer that does nothing, for every build but the test build.
Observer& no_observer();

}  // namespace torchoffload
