// HeldTape: all that the engine keeps for one tape. The ledger has the tape's saves, and HeldRecord is the same for a
// record.
// Ownership:     a share in the context that the tape was opened under.
// Thread safety: needs the GIL.
#pragma once

#include <cstdint>
#include <memory>

#include "core/types.h"
#include "core/windows.h"
#include "engine/context_state.h"
#include "engine/lessons.h"
#include "engine/program.h"
#include "engine/statistics.h"

namespace torchoffload {

struct HeldTape {
  TapeId id;
  std::shared_ptr<ContextState> context;  // null: there is no tape of this index
  TapeRow row;
  TapeLessons lessons;
  TapeWindows windows;
  uint64_t number = 0;  // counts the tapes in the order of opening
  uint64_t record_count = 0;
  uint64_t eligible_bytes = 0;  // of all its records, those beyond the context's fraction included
  int asked_by = kNoGraphTask;  // the graph task that asked last, until its reloads were released
  bool has_backward_begun = false;
  uint64_t fetch_place = 0;  // if slots may be on a disk: the slots of saves from here on were looked at
};

}  // namespace torchoffload
