#include "core/ledger.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/mutant.h"

namespace torchoffload {

namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint64_t kForgetAtLeast = 64;  // with fewer dead saves it is not worth moving the others

[[noreturn]] void broken(const std::string& what) { throw std::logic_error("torchoffload ledger: " + what); }

}  // namespace

const char* to_string(RecordState state) {
  switch (state) {
    case RecordState::Resident:
      return "Resident";
    case RecordState::Offloading:
      return "Offloading";
    case RecordState::Offloaded:
      return "Offloaded";
    case RecordState::Reloading:
      return "Reloading";
    case RecordState::Reloaded:
      return "Reloaded";
    case RecordState::Released:
      return "Released";
  }
  return "?";
}

void Ledger::record_is_gone() { broken("a record was used after its release"); }
void Ledger::tape_is_gone() { broken("a tape was used after it was gone"); }

// ---- tapes ----

TapeId Ledger::open_tape() {
  uint32_t index = 0;
  if (free_tapes_.empty()) {
    index = static_cast<uint32_t>(tapes_.size());
    free_tapes_.reserve(tapes_.size() + 1);
    tapes_.grow_to(index + size_t{1});
  } else {
    index = free_tapes_.back();
    free_tapes_.pop_back();
  }
  Tape& tape = tapes_[index];
  tape.in_use = true;
  tape.open = true;
  ++live_tapes_;
  return {index, tape.generation};
}

Ledger::ClosedTape Ledger::close_tape(TapeId id) {
  Tape& closing = tape(id);
  closing.open = false;
  closing.by_storage.clear();
  const bool gone = closing.live_records == 0;
  if (gone) free_tape(id);
  return {gone};
}

void Ledger::free_tape(TapeId id) {
  Tape& tape = tapes_[id.index];
  const uint32_t next_generation = tape.generation + 1;
  tape = Tape{};
  tape.generation = next_generation;
  free_tapes_.push_back(id.index);
  --live_tapes_;
}

// An open tape may outlive its records, as in a loop without backward inside one entry of a context.
void Ledger::forget_dead_saves(Tape& tape) {
  while (tape.dead_prefix < tape.saves.size() && !is_live(tape.saves[tape.dead_prefix].record)) ++tape.dead_prefix;
  if (tape.dead_prefix < kForgetAtLeast || 2 * tape.dead_prefix < tape.saves.size()) return;
  tape.saves.erase(tape.saves.begin(), tape.saves.begin() + static_cast<ptrdiff_t>(tape.dead_prefix));
  tape.first_save += std::exchange(tape.dead_prefix, 0);
}

// ---- records ----

std::optional<RecordId> Ledger::find(TapeId tape_id, const Identity& identity, const Span& span,
                                     uint64_t itemsize) const {
  const Tape& tape = tapes_[tape_id.index];
  const auto head = tape.by_storage.find(identity.storage);
  if (head == tape.by_storage.end()) return std::nullopt;
  for (uint32_t index = head->second; index != kNone; index = records_[index].next_same_storage) {
    const Record& record = records_[index];
    const Identity& known = record.identity;
    const bool same_memory = mutated(Mutant::IdentityChecksAllocation) || known.allocation == identity.allocation;
    const bool at_same_place = mutated(Mutant::IdentityChecksData) ||
                               (known.data == identity.data && known.nbytes == identity.nbytes && same_memory);
    const bool same_tensor =
        (mutated(Mutant::IdentityChecksVersionCounter) || known.version_counter == identity.version_counter) &&
        (mutated(Mutant::IdentityChecksVersion) || known.version == identity.version);
    const bool same_wrapper = identity.wrapper_counter != nullptr &&
                              known.wrapper_counter == identity.wrapper_counter &&
                              known.wrapper_version == identity.wrapper_version;
    // If the record was not packed inside of this wrapper, the wrapper's version at that time is unknown, unless it is
    // still 0.
    const bool tensor_tells = identity.wrapper_version == 0 || mutated(Mutant::IdentityChecksWrapper);
    const bool unchanged = same_wrapper || (same_tensor && tensor_tells);
    const bool is_any_version = record.state == RecordState::Resident && !record.awaits_room;
    if (!at_same_place || !(unchanged || is_any_version)) continue;
    const bool within = mutated(Mutant::JoinOnlyWithinSpan) || record.span.contains(span);
    const bool aligned = mutated(Mutant::JoinOnlyAligned) || (span.begin - record.span.begin) % itemsize == 0;
    if (within && aligned) return RecordId{index, record.generation};
  }
  return std::nullopt;
}

Ledger::OfStorage Ledger::of_storage(TapeId tape_id, const void* storage) const {
  OfStorage found;
  const Tape& tape = tapes_[tape_id.index];
  const auto head = tape.by_storage.find(storage);
  if (head == tape.by_storage.end()) return found;
  for (uint32_t index = head->second; index != kNone; index = records_[index].next_same_storage) {
    const Record& record = records_[index];
    ++found.records;
    found.is_kept = found.is_kept || record.is_kept();
    found.has_whole = found.has_whole || record.nbytes() == record.identity.nbytes;
  }
  return found;
}

std::optional<RecordId> Ledger::before_of_storage(RecordId id) const {
  const Record& record = records_[id.index];
  if (!is_open(record.tape) || record.next_same_storage == kNone) return std::nullopt;
  return RecordId{record.next_same_storage, records_[record.next_same_storage].generation};
}

RecordId Ledger::add_record(TapeId tape_id, const Identity& identity, const Span& span, Decision decision) {
  Tape& tape = this->tape(tape_id);
  if (!tape.open) broken("a record was added to a closed tape");
  // The calls that may fail for lack of memory come first, so that a record is made wholly or not at all.
  if (free_records_.empty()) {
    if (free_records_.capacity() <= records_.size()) free_records_.reserve(2 * records_.size() + 1);
    records_.grow_to(records_.size() + 1);
    free_records_.push_back(static_cast<uint32_t>(records_.size() - 1));
  }
  const uint32_t index = free_records_.back();
  const auto [head, is_first] = tape.by_storage.try_emplace(identity.storage, index);
  free_records_.pop_back();
  Record& record = records_[index];
  const uint32_t generation = record.generation;
  record = Record{};
  record.state = RecordState::Resident;
  record.generation = generation;
  record.tape = tape_id;
  record.identity = identity;
  record.span = span;
  record.decision = decision;
  if (!is_first) record.next_same_storage = std::exchange(head->second, index);
  tape.total_bytes += span.nbytes();
  ++tape.live_records;
  ++live_records_;
  return {index, generation};
}

void Ledger::unlink(Tape& tape, uint32_t index) {
  const auto head = tape.by_storage.find(records_[index].identity.storage);
  if (head == tape.by_storage.end()) return;
  uint32_t* link = &head->second;
  while (*link != kNone && *link != index) link = &records_[*link].next_same_storage;
  if (*link == index) *link = records_[index].next_same_storage;
  if (head->second == kNone) tape.by_storage.erase(head);
}

uint64_t Ledger::add_handle(RecordId id) {
  Record& joined = record(id);
  Tape& tape = this->tape(joined.tape);
  tape.saves.push_back({id, tape.total_bytes - (joined.was_saved ? 0 : joined.nbytes())});
  joined.was_saved = true;
  ++joined.live_handles;
  ++joined.unseen;
  ++live_handles_;
  return tape.end_save() - 1;
}

Ledger::DroppedHandle Ledger::drop_handle(RecordId id, uint32_t seen_epoch) {
  Record& dropped = record(id);
  DroppedHandle result{.was = dropped.state, .tape = dropped.tape};
  if (seen_epoch != dropped.epoch || dropped.epoch == 0) --dropped.unseen;
  --dropped.live_handles;
  --live_handles_;
  result.all_seen = dropped.unseen == 0;
  release_if_unused(id, result);
  return result;
}

Ledger::DroppedHandle Ledger::release_hold(RecordId id) {
  Record& held = record(id);
  DroppedHandle result{.was = held.state, .tape = held.tape};
  --held.holds;
  result.all_seen = held.unseen == 0;
  release_if_unused(id, result);
  return result;
}

void Ledger::release_if_unused(RecordId id, DroppedHandle& result) {
  Record& record = records_[id.index];
  if (record.live_handles > 0 || record.holds > 0) return;
  result.released = true;
  result.nbytes = record.nbytes();
  Tape& tape = this->tape(record.tape);
  unlink(tape, id.index);
  record.state = RecordState::Released;
  ++record.generation;
  free_records_.push_back(id.index);
  --live_records_;
  --tape.live_records;
  if (tape.open) {
    forget_dead_saves(tape);
  } else if (tape.live_records == 0) {
    free_tape(result.tape);
    result.tape_gone = true;
  }
}

void Ledger::await_room(RecordId id) {
  Record& waiting = expect(id, RecordState::Resident, "await_room");
  if (waiting.is_kept()) broken("a kept record waits for room");
  waiting.awaits_room = true;
}

// ---- transitions ----

Record& Ledger::expect(RecordId id, RecordState from, const char* what) {
  Record& found = record(id);
  if (found.state != from) {
    broken(std::string(what) + " needs a record in state " + to_string(from) + ", this one is " +
           to_string(found.state));
  }
  expect_no_wait(found, what);
  return found;
}

void Ledger::expect_no_wait(const Record& record, const char* what) {
  if (record.awaits_room) broken(std::string(what) + " of a record whose copy waits for room");
}

void Ledger::keep(RecordId id, Reason why) {
  Record& kept = record(id);
  expect_no_wait(kept, "keep");
  if (kept.state == RecordState::Offloading)
    kept.has_slot = false;
  else if (kept.state != RecordState::Resident)
    broken("only a record whose source is here can be kept");
  kept.state = RecordState::Resident;
  kept.decision = Decision::keep(why);
}

void Ledger::begin_offload(RecordId id) {
  Record& moved = expect(id, RecordState::Resident, "begin_offload");
  if (moved.is_kept()) broken("a kept record was offloaded");
  moved.state = RecordState::Offloading;
  moved.has_slot = true;
}

void Ledger::finish_offload(RecordId id) {
  expect(id, RecordState::Offloading, "finish_offload").state = RecordState::Offloaded;
}

void Ledger::use_source(RecordId id) {
  Record& used = record(id);
  if (used.state != RecordState::Resident && used.state != RecordState::Offloading)
    broken(std::string("use_source needs a record whose source is here, this one is ") + to_string(used.state));
  expect_no_wait(used, "use_source");
  used.state = RecordState::Reloaded;
  used.unseen = used.live_handles;
  ++used.epoch;
}

void Ledger::begin_reload(RecordId id) {
  Record& reloaded = expect(id, RecordState::Offloaded, "begin_reload");
  reloaded.state = RecordState::Reloading;
  reloaded.unseen = reloaded.live_handles;
  ++reloaded.epoch;
}

void Ledger::begin_reload_ahead(RecordId id, uint64_t expected_at) {
  begin_reload(id);
  record(id).prefetched = true;
  record(id).expected_at = expected_at;
}

void Ledger::finish_reload(RecordId id) {
  Record& finished = expect(id, RecordState::Reloading, "finish_reload");
  finished.state = RecordState::Reloaded;
  finished.prefetched = false;
}

void Ledger::weaken(RecordId id) {
  Record& weakened = expect(id, RecordState::Reloaded, "weaken");
  if (!weakened.has_slot) broken("a record without a slot gave its device memory up");
  weakened.state = RecordState::Offloaded;
}

void Ledger::pass_by(RecordId id) {
  Record& passed = expect(id, RecordState::Reloading, "pass_by");
  passed.state = RecordState::Offloaded;
  passed.prefetched = false;
}

uint32_t Ledger::mark_seen(RecordId id, uint32_t seen_epoch) {
  Record& seen = record(id);
  if (seen.epoch != 0 && seen_epoch != seen.epoch) --seen.unseen;
  return seen.epoch;
}

// ---- invariants ----

void Ledger::check_invariants() const {
  uint64_t records = 0;
  uint64_t handles = 0;
  std::vector<uint32_t> live_by_tape(tapes_.size(), 0);
  for (uint32_t index = 0; index < records_.size(); ++index) {
    const Record& record = records_[index];
    if (record.state == RecordState::Released) continue;
    ++records;
    handles += record.live_handles;
    if (record.live_handles == 0 && record.holds == 0) broken("a record that nobody uses was not released");
    if (record.unseen > record.live_handles) broken("more handles unseen than alive");
    if (record.prefetched && record.state != RecordState::Reloading) broken("prefetched outside Reloading");
    if (record.is_kept() && record.has_slot) broken("a kept record has a slot");
    if (record.awaits_room && (record.state != RecordState::Resident || record.is_kept()))
      broken("a record waits for room that is not to move, or has moved");
    const bool needs_slot = record.state == RecordState::Offloading || record.state == RecordState::Offloaded ||
                            record.state == RecordState::Reloading;
    if (needs_slot && !record.has_slot) broken(std::string(to_string(record.state)) + " without a slot");
    const Tape& tape = tapes_.at(record.tape.index);
    if (tape.generation != record.tape.generation || !tape.in_use) broken("a record outlived its tape");
    ++live_by_tape[record.tape.index];
  }
  if (records != live_records_ || handles != live_handles_) broken("the counts of live records or handles are off");
  for (size_t index = 0; index < tapes_.size(); ++index) {
    const Tape& tape = tapes_[index];
    if (tape.live_records != live_by_tape[index]) broken("a tape's count of live records is off");
    if (!tape.open && !tape.by_storage.empty()) broken("a closed tape can be joined");
    if (tape.in_use && !tape.open && tape.live_records == 0) broken("an empty closed tape is still here");
    if (tape.dead_prefix > tape.saves.size()) broken("more saves of a tape are dead than it has");
    for (size_t next = 1; next < tape.saves.size(); ++next) {
      if (tape.saves[next - 1].bytes_before > tape.saves[next].bytes_before) broken("a tape's bytes shrink");
    }
  }
}

}  // namespace torchoffload
