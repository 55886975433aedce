// Plan: what a known tape keeps, and how many bytes it may have in flight. Made from what one step showed.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   several tapes that share the link at once: each is planned as if it were alone.
//
// What is kept counts towards both windows, for as long as it is alive: a window is what a tape may hold on the device,
// on its way or not moved at all. So where a large record stays (the log-softmax of a language model) nothing else is
// held beside it at the loss, which is where a step's memory peaks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/ledger.h"

namespace torchoffload {

// What the user set; nullopt where it is to be chosen from what was seen.
struct WindowOptions {
  std::optional<uint64_t> offload_bytes;
  std::optional<uint64_t> offload_records;  // that many of the largest record
  std::optional<uint64_t> reload_bytes;

  friend bool operator==(const WindowOptions&, const WindowOptions&) = default;
};

struct Windows {
  uint64_t offload_bytes = 0;
  uint64_t reload_bytes = 0;
};

// What the largest record alone says: used until more is known.
Windows default_windows(const WindowOptions& options, uint64_t largest_record_bytes);

// What a copy costs each way: nbytes / rate + latency.
struct LinkRates {
  double out_bytes_per_s = 0;
  double in_bytes_per_s = 0;
  double latency_s = 0;

  bool is_known() const { return out_bytes_per_s > 0 && in_bytes_per_s > 0; }
};

// One step's compute, our own waits taken out of it: the times of a run that never waits for us.
struct StepTimes {
  struct Record {
    double ready_s = 0;    // its copy could start
    double needed_s = -1;  // it was first asked for; negative: never
  };
  std::vector<Record> records;  // as in StepShape
  double compute_s = 0;
  LinkRates link;
};

// The records of a tape in the order of their first saves.
struct StepShape {
  std::vector<uint64_t> nbytes;
  std::vector<uint64_t> last_save;  // the number of a record's last save: reloads go from the highest to the lowest
};

struct Plan {
  std::vector<KeptReason> kept;  // None: it moves
  Windows windows;
};

// `times` null: what was seen has no times, and only the tape's end is kept. `keeps_end`: no other tape is packed
// between this tape's end and its backward.
Plan make_plan(const StepShape& shape, const StepTimes* times, const WindowOptions& options, bool keeps_end);

// What a step under `plan` takes, by the rules that the engine follows, at the link's rates.
struct PlannedStep {
  double step_s = 0;
  double bound_s = 0;  // of forward and of backward each the longer one, compute or the link
  uint64_t moved_bytes = 0;
  uint64_t kept_bytes = 0;       // of this plan's records
  uint64_t peak_held_bytes = 0;  // kept and in flight, at most
};
PlannedStep simulate(const StepShape& shape, const StepTimes& times, const Plan& plan);

// Which of `sizes` to take so that their sum is as large as it can be within `cap`; of equal sums the one that takes
// the earlier sizes. Exact for up to 64 sizes with up to 16,384 different sums; for more, to about a hundredth of the
// cap at worst, and no further than to a thousandth.
std::vector<bool> largest_sum_within(const std::vector<uint64_t>& sizes, uint64_t cap);

}  // namespace torchoffload
