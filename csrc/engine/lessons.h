// Lessons: what earlier steps say of the tapes and records of this one. It is told of events, and answers what a record
// is to be, how large the windows are, and which tape comes next.
// Ownership:     values, and storages that outlived their tapes, weakly.
// Thread safety: needs the GIL.
// Not handled:   carrying anything out: Lessons touches no device, ledger or window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/chunked_vector.h"
#include "core/planning/learner.h"
#include "core/planning/tape_order.h"
#include "core/windows.h"
#include "device/memory.h"

namespace torchoffload {

class Lessons {
 public:
  // A record that is about to be made.
  struct NewRecord {
    MemoryRef memory;
    uint64_t nbytes = 0;           // of the record
    uint8_t dtype = 0;             // PyTorch's number of it
    uint8_t dim = 0;               // how many dimensions the tensor has
    uint64_t operator_number = 0;  // tells one operator's records from another's
  };
  // What is known of it.
  struct Known {
    Reason why = Reason::None;    // it is to stay; None: it moves
    WindowBytes limits;           // of its tape from here on
    uint64_t operator_bytes = 0;  // of its operator's records, this one among them
    bool wants_times = false;     // the tape is to be timed
    bool has_lost_way = false;    // its tape went as a known one up to here
  };

  // ---- Forward. ----

  // `learns`: the context's option; without it the tape goes as no known one. Returns its windows until a record comes.
  WindowBytes opened(TapeId tape, const WindowOptions& options, bool learns);
  Known next(TapeId tape, const NewRecord& record);

  // A record stays for a reason that was learned, and until it is released. What stays counts against the windows.
  void kept(Reason why, uint64_t nbytes);
  void released(Reason why, uint64_t nbytes);

  // At the end of its tape, this storage of a record that moved is held by others than the engine.
  void outlived(const WeakMemory& memory);
  // The tape is closed. `last_save`: the number of each record's last save.
  void closed(TapeId tape, std::vector<uint64_t> last_save);
  void gone(TapeId tape);

  // ---- Backward. ----

  // A backward asks for the tape for the first time. Returns whether that was expected.
  bool backward_began(TapeId tape);

  // Was its backward the latest to begin?
  bool is_latest(TapeId tape) const { return order_.is_latest(of(tape).order_number); }

  // The tape that is expected to be asked for `places` after the next one; nullopt: not known, or not opened yet.
  std::optional<TapeId> coming(size_t places) const { return order_.coming(places); }
  bool is_backward_next() const { return order_.is_backward_next(); }

  // Tapes that are alive and belong to no step any more.
  size_t left_behind_count() const { return order_.left_behind_count(); }

  // ---- Times. ----

  // The number of what the closed tape was learned as; nullopt: it was not learned.
  std::optional<uint32_t> shape(TapeId tape) const { return of(tape).shape; }
  // What a timed tape of this shape took.
  void learn_times(uint32_t shape, StepTimes times) { learner_.learn_times(shape, std::move(times)); }

  // ---- Tests. ----

  const Learner& learner() const { return learner_; }
  void plan_as(const Plan& plan) { learner_.plan_as(plan); }  // each known tape goes by this plan
  void forget();                                              // as in a new process

 private:
  struct OfTape {
    WindowOptions options;
    bool learns = false;
    uint64_t order_number = 0;  // see TapeOrder
    Learner::Trace trace;
    std::optional<uint32_t> shape;
    uint64_t latest_record = 0;  // by records_seen_
    uint64_t largest_record_bytes = 0;
    uint64_t latest_operator = UINT64_MAX;
    uint64_t operator_bytes = 0;  // of the records of that operator
  };
  OfTape& of(TapeId tape) { return tapes_[tape.index]; }
  const OfTape& of(TapeId tape) const { return tapes_[tape.index]; }
  RecordKind note_operator(OfTape& tape, const NewRecord& record);

  Learner learner_;
  TapeOrder order_;
  MemorySet lived_on_, lives_on_;  // alive without us at the end of one tape, of two
  uint64_t learned_bytes_ = 0;     // kept as tape_end or small_copy, of all tapes
  uint64_t records_seen_ = 0;
  ChunkedVector<OfTape> tapes_;  // by tape index
};

}  // namespace torchoffload
