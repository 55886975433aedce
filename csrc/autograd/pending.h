// Pending copies: what a thread has packed and not yet enqueued (R1). They belong to the thread that packed.
#pragma once

#include <cstdint>
#include <vector>

#include "autograd/engine.h"

namespace torchoffload {

struct Engine::PendingCopy {
  Engine* engine;
  RecordId record;
  uint64_t sequence_number;     // autograd's, at the pack
  const ContextState* context;  // compared, never followed
};

}  // namespace torchoffload
