// ThreadState: all that the core remembers for one thread. Python keeps PyTorch's stack of hooks beside it.
// Ownership:     one for each thread, leaked on purpose: handles may die while static destructors run.
// Thread safety: used by its own thread alone, with the GIL held.
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

// A record that the thread has packed and whose copy it has not enqueued yet (R1).
struct PendingCopy {
  Engine* engine;
  RecordId record;
  uint64_t sequence_number;     // autograd's sequence number at the pack
  const ContextState* context;  // compared, never dereferenced
};

// The tape that a backward on the thread asked last.
struct AskedTape {
  Engine* engine = nullptr;
  TapeId tape;
  int graph_task = kNoGraphTask;
};

struct ThreadState {
  // How many operations are open, one inside the other, and what the outermost one does when it ends. See Operation.
  int operation_depth = 0;
  std::vector<Memory> dropped;
  std::vector<std::function<void()>> releases;

  std::vector<std::shared_ptr<ContextState>> entered;  // the contexts that the thread has entered, the innermost last
  std::deque<PendingCopy> pending;
  AskedTape asked;

  static ThreadState& current();
};

}  // namespace torchoffload
