// Step: the sizes and the times of a tape's records, and a simulation of the step that uses them under a plan.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   several tapes that share the link at once: each is simulated as if it were alone.
//
// Note [What a learned step may hold]
// A program that fits the device in its first step must fit it in all later ones. So a plan is bounded by the first
// step of a tape of the same sizes, as the same simulation computes it. In forward the plan stays within the peak of
// that step's forward, and in backward within the peak of that whole step. The held bytes are the kept records, the
// records on their way out or back, and the tensors that an operator makes or uses at that moment. All that one
// operator saves exists before any of it can leave, and so it is counted as a whole. A copy is enqueued at the next
// hook event, which may be one operator later. Both cases are simulated, and a plan must be within the first step's
// peak in both. Windows that the user set are obeyed as they are, even if the first step held less.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/ledger.h"
#include "core/windows.h"

namespace torchoffload {

// The windows that the user set, under the names of OffloadActivations; nullopt if they are to be chosen.
struct WindowOptions {
  std::optional<uint64_t> offload_window_bytes;
  std::optional<uint64_t> max_fwd_stash_size;  // the offload window as a count of the tape's largest record
  std::optional<uint64_t> reload_window_bytes;

  bool sets_offload() const { return offload_window_bytes || max_fwd_stash_size; }
  friend bool operator==(const WindowOptions&, const WindowOptions&) = default;
};

// The windows of an unknown tape, by its largest record so far.
WindowBytes default_windows(const WindowOptions& options, uint64_t largest_record_bytes);

// The time of a copy in either direction is its bytes on the link / rate + latency.
struct LinkRates {
  double out_bytes_per_s = 0;
  double in_bytes_per_s = 0;
  double latency_s = 0;

  bool is_known() const { return out_bytes_per_s > 0 && in_bytes_per_s > 0; }
};

// The times of one step's compute, in seconds since the tape's first entry in the timeline. The time in which compute
// waited for us is subtracted.
struct StepTimes {
  struct Record {
    double ready_s = 0;    // when its copy could start
    double needed_s = -1;  // when backward first asked for it; negative: never
  };
  std::vector<Record> records;  // as in StepShape
  double compute_s = 0;
  LinkRates link;
};

// The properties of a record that do not depend on its size: they are the same for each length of a sequence.
struct RecordKind {
  uint8_t dtype = 0;
  uint8_t dim = 0;                // the number of dimensions
  bool is_same_operator = false;  // it was saved by the operator that saved the record before it

  friend bool operator==(const RecordKind&, const RecordKind&) = default;
};

// The records of a tape in the order of their first saves.
struct StepShape {
  std::vector<uint64_t> nbytes;
  std::vector<uint64_t> last_save;  // the number of a record's last save: reloads go from the highest to the lowest
  std::vector<RecordKind> kinds;    // may be empty: then each record was saved by an operator of its own

  size_t count() const { return nbytes.size(); }
  uint64_t largest_bytes() const;
  bool joins_operator(size_t record) const { return !kinds.empty() && record > 0 && kinds[record].is_same_operator; }
};

struct Plan {
  std::vector<Reason> kept;             // by record: why it is kept; None: it moves
  std::vector<uint64_t> offload_bytes;  // by record: the offload window from this record to the next
  uint64_t reload_bytes = 0;
  uint64_t window_bytes = 0;  // the size of the windows beside the records kept as needed_soon
  // By record: the reload window from the moment on at which backward asks for it. Empty: it is always reload_bytes.
  std::vector<uint64_t> reload_bytes_from;

  WindowBytes windows(size_t record) const { return {offload_bytes[record], reload_bytes}; }
};

// The most bytes that are held on the device; see Note [What a learned step may hold].
struct HeldBytes {
  uint64_t forward = 0;
  uint64_t forward_late = 0;  // if each copy is enqueued one operator late
  uint64_t backward = 0;
};

// The time and the memory of a step under a plan, as simulated.
struct PlannedStep {
  double step_s = 0;
  double bound_s = 0;  // the least time possible: for forward and for backward the longer of compute and link
  uint64_t moved_bytes = 0;
  uint64_t kept_bytes = 0;
  HeldBytes held;
};

// An event of a simulated step, for tests that compare it with an engine's events.
struct StepEvent {
  enum class What : uint8_t { WaitForOffload, Ask, ReloadAskedFor, ReloadAhead };
  What what;
  size_t record = 0;
};
// Simulates a step under a plan by the rules that the engine follows, at the link's rates. `events`: a list to which
// the events are appended in their order, or null. `most_s`: the simulation ends early once it is certain that the step
// takes longer than this; its time is then infinite, and the other results mean nothing.
PlannedStep simulate(const StepShape& shape, const StepTimes& times, const Plan& plan,
                     std::vector<StepEvent>* events = nullptr, double most_s = std::numeric_limits<double>::infinity());

// Times that express only an order: records are made one after the other, and asked for in reverse.
StepTimes times_in_order(size_t record_count);

// The plan of a tape's first step, before anything was learned: all records move, with the windows of
// default_windows().
Plan first_plan(const StepShape& shape, const WindowOptions& options);

// For each record, by its number: which records the operator that saved it has saved.
struct OperatorSaves {
  std::vector<size_t> end;       // the number behind the operator's last record
  std::vector<uint64_t> nbytes;  // the bytes of all of the operator's records
};
OperatorSaves operator_saves(const StepShape& shape);

}  // namespace torchoffload
