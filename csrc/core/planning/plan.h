// Plan: what a known tape keeps, and how many bytes it may have in flight. Made from what one step showed.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   several tapes that share the link at once: each is planned as if it were alone.
//
// What is kept counts towards both windows, for as long as it is alive: a window is what a tape may hold on the device,
// on its way or not moved at all. So where a large record stays (the log-softmax of a language model) nothing else is
// held beside it at the loss, which is where a step's memory peaks. How much a plan may hold at all says
// Note [What a learned step may hold].
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/planning/step.h"

namespace torchoffload {

// `times` null: what was seen has no times, and only the tape's end is kept. `keeps_end`: no other tape is packed
// between this tape's end and its backward. `window_bytes`: what the windows have beside what returns soon; chosen,
// where it is not told.
Plan make_plan(const StepShape& shape, const StepTimes* times, const WindowOptions& options, bool keeps_end,
               std::optional<uint64_t> window_bytes = std::nullopt);

// Which of `sizes` to take so that their sum is as large as it can be within `cap`; of equal sums the one that takes
// the earlier sizes. Exact for up to 64 sizes with up to 16,384 different sums; for more, to about a hundredth of the
// cap at worst, and no further than to a thousandth.
std::vector<bool> largest_sum_within(const std::vector<uint64_t>& sizes, uint64_t cap);

}  // namespace torchoffload
