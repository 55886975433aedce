// Step: what a tape's records are, when they are wanted, and what the device holds while a step goes through them.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   several tapes that share the link at once: each is gone through as if it were alone.
//
// Note [What a learned step may hold]
// A program that fits the device in its first step must fit it in all later ones. So a plan is bounded by the first
// step of a tape of the same sizes, gone through by the same simulation: in forward it holds at most as much as that
// step's most in forward, in backward at most as much as that step's most. What is held is what was kept, what is on
// its way out or back, and what an operator makes or uses at that moment. What one operator saves exists as a whole
// before any of it can leave, and so it is counted as a whole. A copy is enqueued at the next hook event, and that may
// be one operator later. Both cases are gone through, and a plan must be within the first step's peak in both. Windows
// that the user set are obeyed as they are, whatever the first step held.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/ledger.h"
#include "core/windows.h"

namespace torchoffload {

// What the user set, under the names of OffloadActivations; nullopt where it is to be chosen from what was seen.
struct WindowOptions {
  std::optional<uint64_t> offload_window_bytes;
  std::optional<uint64_t> max_fwd_stash_size;  // the offload window as a count of the tape's largest record
  std::optional<uint64_t> reload_window_bytes;

  bool sets_offload() const { return offload_window_bytes || max_fwd_stash_size; }
  friend bool operator==(const WindowOptions&, const WindowOptions&) = default;
};

// What the largest record of the tape so far says: used while nothing is known of the tape.
WindowBytes default_windows(const WindowOptions& options, uint64_t largest_record_bytes);

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

// What a record is, whatever its size: the same for each length of a sequence.
struct RecordKind {
  uint8_t dtype = 0;
  uint8_t dim = 0;                // how many dimensions
  bool is_same_operator = false;  // it was saved by the operator that saved the record before it

  friend bool operator==(const RecordKind&, const RecordKind&) = default;
};

// The records of a tape in the order of their first saves.
struct StepShape {
  std::vector<uint64_t> nbytes;
  std::vector<uint64_t> last_save;  // the number of a record's last save: reloads go from the highest to the lowest
  std::vector<RecordKind> kinds;    // empty: each record was saved by an operator of its own

  size_t count() const { return nbytes.size(); }
  uint64_t largest_bytes() const;
  bool joins_operator(size_t record) const { return !kinds.empty() && record > 0 && kinds[record].is_same_operator; }
};

struct Plan {
  std::vector<Reason> kept;             // None: it moves
  std::vector<uint64_t> offload_bytes;  // the offload window from each record to the next
  uint64_t reload_bytes = 0;
  uint64_t window_bytes = 0;  // what the windows have beside what returns soon

  WindowBytes windows(size_t record) const { return {offload_bytes[record], reload_bytes}; }
};

// The most that is held on the device; see Note [What a learned step may hold].
struct HeldBytes {
  uint64_t forward = 0;
  uint64_t forward_late = 0;  // where each copy is enqueued one operator late
  uint64_t backward = 0;
};

// What a step under a plan takes, by the rules that the engine follows, at the link's rates.
struct PlannedStep {
  double step_s = 0;
  double bound_s = 0;  // of forward and of backward each the longer one, compute or the link
  uint64_t moved_bytes = 0;
  uint64_t kept_bytes = 0;  // of this plan's records
  HeldBytes held;
};

// What happens in a step that is gone through, for who compares it with what an engine does.
struct StepEvent {
  enum class What : uint8_t { WaitForOffload, Ask, ReloadAskedFor, ReloadAhead };
  What what;
  size_t record = 0;
};
// `events`: where to note what happens, in order; null: nowhere.
PlannedStep simulate(const StepShape& shape, const StepTimes& times, const Plan& plan,
                     std::vector<StepEvent>* events = nullptr);

// Times that say nothing but the order: records are made one after the other, and asked for in reverse.
StepTimes times_in_order(size_t record_count);

// What the first step of such a tape does, of which nothing is known: all moves, by the windows of the largest record.
Plan first_plan(const StepShape& shape, const WindowOptions& options);

// For each operator's records, by number: their end, and the bytes of all of them together.
struct OperatorSaves {
  std::vector<size_t> end;
  std::vector<uint64_t> nbytes;
};
OperatorSaves operator_saves(const StepShape& shape);

}  // namespace torchoffload
