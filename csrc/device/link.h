// Link: copies between a device and the slots of a tier. A part of a Backend.
// Ownership:     keeps no reference to memory or slot after a call, except if the stream of the copy completes
//                ByPolling: then both are touched until the copy's point is reached.
// Thread safety: every method, any thread. A copy may block, as Streams::may_block() says.
// Failures:      a call that throws has enqueued nothing. A copy that fails later says so by failure().
// Stream order:  a copy is enqueued on the stream that is named, and waits for nothing else.
// Shutdown:      lives for the process; see Note [No CUDA after main].
#pragma once

#include <cstdint>
#include <string>

#include "core/types.h"
#include "storage/slot_store.h"

namespace torchoffload {

class Link {
 public:
  virtual ~Link() = default;

  // Enqueues a copy of `nbytes` on `stream`. source/target are device addresses.
  virtual void copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) = 0;
  virtual void copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) = 0;

  // The reason why the copy that ended at `point` failed, or empty. Valid once the point was reached.
  virtual std::string failure(Point) { return {}; }

  // Nobody asks for the failure of this copy any more.
  virtual void forget(Point) {}
};

}  // namespace torchoffload
