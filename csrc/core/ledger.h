// Ledger: who holds what. Records, the handles counted on them, tapes, states; it decides nothing about order or bytes.
// Ownership:     values only. The engine keeps what a record holds (tensors, slots, points) beside it, by RecordId.
// Thread safety: none; touched only with the GIL held.
// Failures:      a transition from a wrong state throws std::logic_error and changes nothing.
// Invariants:    a released record is in no tape's count; every other record has a handle or is held;
//                unseen <= live_handles; only a record that is Reloading carries `prefetched`; no record is added to a
//                closed tape, and none of its records is joined. See check_invariants().
//
// No call runs Python or drops anything: a call returns what is to be dropped, and the engine drops it afterwards. A
// reference to a record or a tape stays valid while others are added.
//
//            begin_offload          finish_offload         begin_reload           finish_reload
//   Resident -------------> Offloading ------------> Offloaded ------------> Reloading ------------> Reloaded
//      \___________________________/ use_source --------------------------------------------------->   |
//                                                    ^ pass_by ________________/                       |
//                                                    ^ give_up (only with a slot) _____________________/
//   any state -> Released when the last handle dies and nobody holds the record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/chunked_vector.h"
#include "core/decision.h"
#include "core/types.h"

namespace torchoffload {

enum class RecordState : uint8_t { Resident, Offloading, Offloaded, Reloading, Reloaded, Released };
const char* to_string(RecordState state);

// What makes two saves the same bytes. The pointers are compared, never followed; the engine holds both objects for as
// long as the record can be joined, so that their addresses cannot name something else.
struct Identity {
  const void* storage = nullptr;
  const void* version_counter = nullptr;
  uint32_t version = 0;
  const void* data = nullptr;  // a veto, not a key
  uint64_t nbytes = 0;         // likewise: of the storage
  uint64_t allocation = 0;     // likewise: the memory may be given back and come again at the same address
  // Of a wrapper subclass's inner tensor: the wrapper's, since what is written through a wrapper is not counted inside.
  const void* wrapper_counter = nullptr;
  uint32_t wrapper_version = 0;
};

struct Record {
  RecordState state = RecordState::Released;
  Decision decision;  // where it is to be; a record that is kept after all says so here
  bool has_slot = false;
  bool was_saved = false;    // had a handle
  bool prefetched = false;   // reloaded ahead, not yet asked for
  uint64_t expected_at = 0;  // then: the save that it was reloaded for
  TapeId tape;
  uint32_t generation = 0;
  uint32_t live_handles = 0;
  uint32_t holds = 0;   // by who enqueues a copy of it; see hold()
  uint32_t unseen = 0;  // live handles not given the bytes since the last reload
  uint32_t epoch = 0;   // counts reloads; a handle that was given the bytes remembers it
  uint32_t next_same_storage = UINT32_MAX;
  Identity identity;
  Span span;  // the bytes of the storage that the record stands for

  uint64_t nbytes() const { return span.nbytes(); }
  bool is_kept() const { return decision.keeps(); }
};

// One save, in the order of the saves: backward asks for them from the last to the first. A record saved by several
// operators stands in several saves, so the consumer's place is told by the save it asks for, not by the record.
struct Save {
  RecordId record;
  uint64_t bytes_before = 0;  // of the tape's records made before it
};

struct Tape {
  uint32_t generation = 0;
  bool in_use = false;
  bool open = false;
  uint32_t live_records = 0;
  uint64_t first_save = 0;   // the number of saves[0]: those before it are forgotten
  uint64_t dead_prefix = 0;  // of `saves`, whose records are gone
  std::vector<Save> saves;
  uint64_t total_bytes = 0;
  std::unordered_map<const void*, uint32_t> by_storage;  // head of the chain through next_same_storage

  uint64_t end_save() const { return first_save + saves.size(); }
  const Save& save(uint64_t number) const { return saves.at(number - first_save); }
};

class Ledger {
 public:
  // Tapes.
  TapeId open_tape();
  // No save joins it any more. The tape goes when its last record does; `gone` says whether that is now.
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

  // Records.
  // The live record of the open tape that stands for exactly these bytes: same identity, a span that contains `span`,
  // at a distance that is a multiple of `itemsize`. A record whose copy was not enqueued yet stands for whatever the
  // storage holds, so versions do not matter: views may count theirs apart.
  std::optional<RecordId> find(TapeId tape, const Identity& identity, const Span& span, uint64_t itemsize) const;
  // What the open tape has of a storage.
  struct OfStorage {
    uint32_t records = 0;
    bool is_kept = false;    // one of them is, and with it all of the storage
    bool has_whole = false;  // one of them stands for all of it, if not as it is now
  };
  OfStorage of_storage(TapeId tape, const void* storage) const;
  RecordId add_record(TapeId tape, const Identity& identity, const Span& span, Decision decision);
  // The index of the next record is below this.
  size_t next_index_limit() const { return records_.size() + 1; }
  bool is_live(RecordId id) const {
    if (id.index >= records_.size()) return false;
    const Record& record = records_[id.index];
    return record.generation == id.generation && record.state != RecordState::Released;
  }
  Record& record(RecordId id) {
    if (!is_live(id)) record_is_gone();
    return records_[id.index];
  }

  // Returns the number of the save in its tape.
  uint64_t add_handle(RecordId id);
  struct DroppedHandle {
    bool released = false;  // the last one: drop all that the record holds
    bool all_seen = false;  // the device bytes may be given up
    bool tape_gone = false;
    RecordState was = RecordState::Released;
    TapeId tape;
  };
  DroppedHandle drop_handle(RecordId id, uint32_t seen_epoch);

  // Until let_go() the record is not released, though its last handle dies. Holds are counted.
  void hold(RecordId id) { ++record(id).holds; }
  DroppedHandle let_go(RecordId id);
  // Will the next drop_handle(), or let_go(), release it?
  bool is_last_handle(RecordId id) { return record(id).live_handles == 1 && record(id).holds == 0; }
  bool is_last_hold(RecordId id) { return record(id).live_handles == 0 && record(id).holds == 1; }

  // Transitions. Each checks its from-state and throws std::logic_error when it is another.
  void keep(RecordId id, Reason why);  // Resident or Offloading -> Resident, for good
  void begin_offload(RecordId id);
  void finish_offload(RecordId id);
  void use_source(RecordId id);  // the source is the reloaded copy; every handle may have it once
  void begin_reload(RecordId id);
  void begin_reload_ahead(RecordId id, uint64_t expected_at);
  void finish_reload(RecordId id);
  void give_up(RecordId id);
  void pass_by(RecordId id);

  // A handle was given the bytes. Returns its mark, to be handed to drop_handle.
  uint32_t mark_seen(RecordId id, uint32_t seen_epoch);
  bool all_seen(RecordId id) { return record(id).unseen == 0; }

  uint64_t live_records() const { return live_records_; }
  uint64_t live_handles() const { return live_handles_; }
  uint64_t live_tapes() const { return live_tapes_; }

  void check_invariants() const;

 private:
  [[noreturn]] static void record_is_gone();
  [[noreturn]] static void tape_is_gone();
  void release_if_unused(RecordId id, DroppedHandle& result);
  void unlink(Tape& tape, uint32_t index);
  void forget_dead_saves(Tape& tape);
  void free_tape(TapeId id);
  Record& expect(RecordId id, RecordState from, const char* what);

  ChunkedVector<Record> records_;
  std::vector<uint32_t> free_records_;  // has room for all, so that a release never allocates
  ChunkedVector<Tape> tapes_;
  std::vector<uint32_t> free_tapes_;
  uint64_t live_records_ = 0;
  uint64_t live_handles_ = 0;
  uint64_t live_tapes_ = 0;
};

}  // namespace torchoffload
