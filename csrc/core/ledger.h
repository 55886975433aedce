// Ledger: the records, with the state, the handles and the tape of each.
// Ownership:     values only. The engine keeps a record's memory, slot and points beside it, by RecordId.
// Thread safety: none; touched only with the GIL held.
// Failures:      a transition from a wrong state throws std::logic_error and changes nothing.
// Invariants:    a released record is counted by no tape; every other record has a handle or a hold;
//                unseen <= live_handles; only a record that is Reloading carries `prefetched`, and only one that is
//                Resident and to move `awaits_room`; no record is added to a closed tape, and none of its records is
//                joined. See check_invariants().
//
// No call runs Python or drops memory: a call returns the objects to drop, and the engine drops them afterwards. A
// reference to a record or a tape stays valid while others are added.
//
//            begin_offload          finish_offload         begin_reload           finish_reload
//   Resident -------------> Offloading ------------> Offloaded ------------> Reloading ------------> Reloaded
//      \___________________________/ use_source --------------------------------------------------->   |
//                                                    ^ pass_by ________________/                       |
//                                                    ^ weaken (only with a slot) _____________________/
//   any state -> Released when the record has neither handles nor holds any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/chunked_vector.h"
#include "core/decision.h"
#include "core/types.h"

namespace torchoffload {

enum class RecordState : uint8_t { Resident, Offloading, Offloaded, Reloading, Reloaded, Released };
const char* to_string(RecordState state);

// Two saves with the same identity have the same bytes. The pointers are compared, never dereferenced. The engine holds
// both objects for as long as the record can be joined, so that nothing else can get their addresses.
struct Identity {
  const void* storage = nullptr;
  const void* version_counter = nullptr;
  uint32_t version = 0;
  // No record is looked up by these three, but if one of them differs, the bytes are others: the program may resize a
  // storage, and new memory may be allocated at the old address.
  const void* data = nullptr;
  uint64_t nbytes = 0;  // of the storage
  uint64_t allocation = 0;
  // For an inner tensor of a wrapper subclass: the wrapper's counter and version, since a write through the wrapper
  // does not raise the inner tensor's.
  const void* wrapper_counter = nullptr;
  uint32_t wrapper_version = 0;
};

struct Record {
  RecordState state = RecordState::Released;
  Decision decision;  // the place that it is to have; keep() changes it
  bool has_slot = false;
  bool was_saved = false;    // a handle was added to it
  bool awaits_room = false;  // its copy out waits for room in the store; see await_room()
  bool prefetched = false;   // it was reloaded ahead and is not asked for yet
  uint64_t expected_at = 0;  // if it is prefetched: the number of the save that it was reloaded for
  TapeId tape;
  uint32_t generation = 0;
  uint32_t live_handles = 0;
  uint32_t holds = 0;   // of calls that enqueue a copy of it; see hold()
  uint32_t unseen = 0;  // live handles that were not given the bytes since the last reload
  uint32_t epoch = 0;   // counts reloads; a handle that is given the bytes remembers the present count
  uint32_t next_same_storage = UINT32_MAX;
  Identity identity;
  Span span;  // the bytes of the storage that the record stands for

  uint64_t nbytes() const { return span.nbytes(); }
  bool is_kept() const { return decision.keeps(); }
};

// One save of a tape. Backward usually asks for saves from the last to the first. A record that several operators save
// has several saves, so the consumer's place is the save that it asks for, and not the record.
struct Save {
  RecordId record;
  uint64_t bytes_before = 0;  // the bytes of the tape's records that were made before this one
};

struct Tape {
  uint32_t generation = 0;
  bool in_use = false;
  bool open = false;
  uint32_t live_records = 0;
  uint64_t first_save = 0;   // the number of saves[0]: earlier ones are forgotten
  uint64_t dead_prefix = 0;  // so many of the first `saves` have records that were released
  std::vector<Save> saves;
  uint64_t total_bytes = 0;
  std::unordered_map<const void*, uint32_t> by_storage;  // head of the chain through next_same_storage

  uint64_t end_save() const { return first_save + saves.size(); }
  const Save& save(uint64_t number) const { return saves.at(number - first_save); }
};

class Ledger {
 public:
  // ---- tapes ----

  TapeId open_tape();
  // No save is added to the tape any more. The tape is gone with its last record; `gone` says whether it is gone now.
  struct ClosedTape {
    bool gone = false;
  };
  ClosedTape close_tape(TapeId id);
  bool is_open(TapeId id) const { return has_tape(id) && tapes_[id.index].open; }
  bool has_tape(TapeId id) const {
    if (id.index >= tapes_.size()) return false;
    const Tape& tape = tapes_[id.index];
    return tape.generation == id.generation && tape.in_use;
  }
  Tape& tape(TapeId id) {
    if (!has_tape(id)) tape_is_gone();
    return tapes_[id.index];
  }

  // ---- records ----

  // The live record of the open tape that stands for these bytes: it has the same identity and a span that contains
  // `span`, at a distance that is a multiple of `itemsize`. A record whose copy is not enqueued yet stands for the
  // storage's present bytes, so versions are not compared: views may have version counters of their own. This does not
  // hold for a record whose copy waits for room: the operators after the one that saved it have begun.
  std::optional<RecordId> find(TapeId tape, const Identity& identity, const Span& span, uint64_t itemsize) const;
  // The open tape's records of one storage.
  struct OfStorage {
    uint32_t records = 0;
    bool is_kept = false;    // one of them is kept, and with it the whole storage
    bool has_whole = false;  // one of them stands for the whole storage, perhaps at another version
  };
  OfStorage of_storage(TapeId tape, const void* storage) const;
  // The record of the same tape and storage that was made before this one; nullopt: there is none, or the tape is
  // closed.
  std::optional<RecordId> before_of_storage(RecordId id) const;
  RecordId add_record(TapeId tape, const Identity& identity, const Span& span, Decision decision);
  // A limit above the index of the next record.
  size_t next_index_limit() const { return records_.size() + 1; }
  bool is_live(RecordId id) const {
    if (id.index >= records_.size()) return false;
    const Record& record = records_[id.index];
    return record.generation == id.generation && record.state != RecordState::Released;
  }
  [[gnu::always_inline]] Record& record(RecordId id) {
    if (!is_live(id)) record_is_gone();
    return records_[id.index];
  }

  // Adds a handle, and with it a save. Returns the number of the save in its tape.
  uint64_t add_handle(RecordId id);
  struct DroppedHandle {
    bool released = false;   // it was the last one: the caller drops all that it holds of the record
    bool all_seen = false;   // each live handle was given the bytes: the caller may weaken them
    bool tape_gone = false;  // the record was the last one of a closed tape
    RecordState was = RecordState::Released;
    TapeId tape;
    uint64_t nbytes = 0;  // of the record, if it was released
  };
  DroppedHandle drop_handle(RecordId id, uint32_t seen_epoch);

  // The record is not released before release_hold(), even if its last handle dies. Holds are counted.
  void hold(RecordId id) { ++record(id).holds; }
  DroppedHandle release_hold(RecordId id);
  // Releases a hold, unless that would release the record: then it does nothing and returns false.
  bool release_hold_unless_last(RecordId id) {
    Record& held = record(id);
    if (held.live_handles == 0 && held.holds == 1) return false;
    --held.holds;
    return true;
  }
  // Will the next drop_handle() release the record?
  bool is_last_handle(RecordId id) { return record(id).live_handles == 1 && record(id).holds == 0; }

  // The record's copy out would be enqueued now, if its store had room. The record stays Resident until then, and
  // stands for its bytes at its version. Throws std::logic_error if the record is not to move, or waits already.
  void await_room(RecordId id);
  // It waits no more: call it before any transition. Returns whether it did wait.
  bool stop_awaiting_room(RecordId id) { return std::exchange(record(id).awaits_room, false); }

  // ---- transitions: each checks the state that it comes from, and throws std::logic_error if it is another ----

  void keep(RecordId id, Reason why);  // Resident or Offloading -> Resident, for ever
  void begin_offload(RecordId id);
  void finish_offload(RecordId id);
  void use_source(RecordId id);  // the source takes the place of a reloaded buffer
  void begin_reload(RecordId id);
  void begin_reload_ahead(RecordId id, uint64_t expected_at);
  void finish_reload(RecordId id);
  void weaken(RecordId id);
  void pass_by(RecordId id);

  // A handle was given the bytes. Returns the present epoch, for the handle to remember and hand to drop_handle().
  uint32_t mark_seen(RecordId id, uint32_t seen_epoch);
  bool all_seen(RecordId id) { return record(id).unseen == 0; }

  uint64_t live_records() const { return live_records_; }
  uint64_t live_handles() const { return live_handles_; }
  uint64_t live_tapes() const { return live_tapes_; }

  void check_invariants() const;

 private:
  // Throw std::logic_error: an id was used after its record or tape was released.
  [[noreturn]] static void record_is_gone();
  [[noreturn]] static void tape_is_gone();
  // Releases a record that has neither handles nor holds, and its tape if that is closed and has no other record.
  void release_if_unused(RecordId id, DroppedHandle& result);
  // Takes a record out of its tape's list for the storage.
  void unlink(Tape& tape, uint32_t index);
  // Shortens `saves` if many of the first ones have records that were released.
  void forget_dead_saves(Tape& tape);
  void free_tape(TapeId id);
  // The record, which must be in state `from`. `what` is the transition that the error names.
  Record& expect(RecordId id, RecordState from, const char* what);
  static void expect_no_wait(const Record& record, const char* what);

  ChunkedVector<Record> records_;
  std::vector<uint32_t> free_records_;  // has capacity for all records, so that a release never allocates
  ChunkedVector<Tape> tapes_;
  std::vector<uint32_t> free_tapes_;
  uint64_t live_records_ = 0;
  uint64_t live_handles_ = 0;
  uint64_t live_tapes_ = 0;
};

}  // namespace torchoffload
