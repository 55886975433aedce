// Plan: which records of a known tape are kept, and how many bytes it may have in flight, as one step showed.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   several tapes that share the link at once: each is planned as if it were alone.
//
// A kept record counts towards both windows for as long as it is alive: a window bounds the bytes that a tape may hold
// on the device, whether it is on its way or kept. So while a large record is kept (the log-softmax of a language
// model) nothing else is held beside it at the loss, when a step's memory peaks. Note [What a learned step may hold]
// says how much a plan may hold at all.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/planning/step.h"

namespace torchoffload {

// `times`: null if no times are known, and then only the tape's end and small copies are kept. `keeps_end`: no other
// tape is packed between this tape's end and its backward. `window_bytes`: the size of the windows beside the records
// kept as needed_soon; nullopt: it is chosen.
Plan make_plan(const StepShape& shape, const StepTimes* times, const WindowOptions& options, bool keeps_end,
               std::optional<uint64_t> window_bytes = std::nullopt);

// Which of `sizes` to take so that their sum is as large as possible without exceeding `cap`. Of equal sums it is the
// one that takes the earlier sizes. Exact for up to 64 sizes with up to 16,384 different sums. With more it is within
// about a hundredth of the cap at worst, and the search stops once it is within a thousandth.
std::vector<bool> largest_sum_within(const std::vector<uint64_t>& sizes, uint64_t cap);

}  // namespace torchoffload
