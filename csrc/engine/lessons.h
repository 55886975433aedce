// Lessons: learns from earlier steps how to treat the tapes and records of this one. It is told of events, and answers
// whether a record should be kept, how large the windows are, and which tape's backward comes next.
// Ownership:     values, and weak references to storages that outlived their tapes.
// Thread safety: needs the GIL.
// Not handled:   carrying its answers out: Lessons touches no device, ledger or window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/planning/learner.h"
#include "core/planning/tape_order.h"
#include "core/windows.h"
#include "device/memory.h"

namespace torchoffload {

// The memory that Lessons has of one tape. Its caller keeps it with the tape.
struct TapeLessons {
  WindowOptions options;
  bool learns = false;
  uint64_t order_number = 0;  // TapeOrder's number for the tape
  Learner::Trace trace;
  std::optional<uint32_t> shape;  // as which the closed tape was learned; nullopt: it was not learned
  uint64_t latest_record = 0;     // the count of all records at the tape's latest one
  uint64_t largest_record_bytes = 0;
  uint64_t latest_operator = UINT64_MAX;
  uint64_t operator_bytes = 0;  // saved so far by that operator
};

class Lessons {
 public:
  // A record that is about to be made.
  struct NewRecord {
    MemoryRef memory;
    uint64_t nbytes = 0;           // of the record
    uint8_t dtype = 0;             // PyTorch's number for the dtype
    uint8_t dim = 0;               // the number of dimensions
    uint64_t operator_number = 0;  // records with the same number were saved by one operator
  };
  // The lessons of earlier steps for it.
  struct Known {
    Reason why = Reason::None;    // why it should be kept; None: it moves
    WindowBytes limits;           // the windows of its tape from here on
    uint64_t operator_bytes = 0;  // saved so far by its operator, this record included
    bool wants_times = false;     // the tape is to be timed
    bool has_lost_way = false;    // the tape matched a known one up to the record before, and matches none any more
  };

  // ---- forward ----

  // A tape was opened. `learns` is the context's option: without it the tape is compared with no known one. Returns its
  // windows until its first record.
  WindowBytes opened(TapeLessons& tape, TapeId id, const WindowOptions& options, bool learns);
  // The tape's next record is about to be made.
  Known next(TapeLessons& tape, const NewRecord& record);

  // A record is kept for a learned reason, until released() is called for it. The kept bytes count against the windows.
  void kept(Reason why, uint64_t nbytes);
  void released(Reason why, uint64_t nbytes);

  // The storage of a record that moved is held by others than the engine when its tape closes.
  void outlived(const WeakMemory& memory);
  // The tape is closed. `last_save`: the number of each record's last save.
  void closed(TapeLessons& tape, std::vector<uint64_t> last_save);
  // The tape's last record was released.
  void gone(const TapeLessons& tape) { order_.gone(tape.order_number); }

  // ---- backward ----

  // A backward asks for the tape for the first time. Returns whether that was expected.
  bool backward_began(const TapeLessons& tape);

  // Was the tape's backward the latest to begin?
  bool is_latest(const TapeLessons& tape) const { return order_.is_latest(tape.order_number); }

  // The tape that is expected to be asked for `places` after the next one; nullopt: not known, or not opened yet.
  std::optional<TapeId> coming(size_t places) const { return order_.coming(places); }
  // Is a backward expected next, rather than another forward?
  bool is_backward_next() const { return order_.is_backward_next(); }

  // Tapes that are alive and belong to no step any more; see Note [Tapes that are left behind].
  size_t left_behind_count() const { return order_.left_behind_count(); }

  // ---- times ----

  // The times of a timed tape of this shape.
  void learn_times(uint32_t shape, const StepTimes& times) { learner_.learn_times(shape, times); }

  // ---- for tests ----

  const Learner& learner() const { return learner_; }
  void plan_as(const Plan& plan) { learner_.plan_as(plan); }  // every known tape follows this plan
  void clear();                                               // forgets all steps, as in a new process

 private:
  // Returns the kind of the tape's next record, and adds it to its operator's known saves.
  static RecordKind note_operator(TapeLessons& tape, const NewRecord& record);

  Learner learner_;
  TapeOrder order_;
  MemorySet lived_on_, lives_on_;  // storages that others than the engine held at the end of one tape, and of two
  uint64_t learned_bytes_ = 0;     // of all tapes: the bytes kept as tape_end or small_copy
  uint64_t records_seen_ = 0;
};

}  // namespace torchoffload
