// ThreadState: all that the core remembers of the calling thread. Python keeps PyTorch's stack of hooks beside it.
// Ownership:     one for each thread. It is leaked on purpose: handles may die while static destructors run.
// Thread safety: its thread's own; needs the GIL.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/types.h"
#include "device/memory.h"
#include "engine/program.h"

namespace torchoffload {

class Engine;
struct ContextState;

// What the thread has packed and not yet enqueued (R1).
struct PendingCopy {
  Engine* engine;
  RecordId record;
  uint64_t sequence_number;     // autograd's, at the pack
  const ContextState* context;  // compared, never followed
};

// The tape that a backward of the thread asked for last.
struct AskedTape {
  Engine* engine = nullptr;
  TapeId tape;
  int graph_task = kNoGraphTask;
};

struct ThreadState {
  // The operations that are open, one inside the other, and what the outermost one does when it ends. See Operation.
  int operation_depth = 0;
  std::vector<Memory> dropped;
  std::vector<std::function<void()>> releases;

  std::vector<std::shared_ptr<ContextState>> entered;  // the contexts that the thread is in, the innermost last
  std::deque<PendingCopy> pending;
  AskedTape asked;

  static ThreadState& current();
};

}  // namespace torchoffload
