// The engine's tapes, from their opening to their end, and the times of their copies and backwards.
#include "engine/engine.h"

#include <utility>

namespace torchoffload {

// ---- tapes ----

void Engine::settle() {
  if (!backend_.memory.must_settle()) return;
  const BlockingSection blocking;
  backend_.memory.settle();
}

void Engine::fit_store(ContextState& context) {
  if (is_inherited() || Statistics::global().live_tapes > Statistics::global().tapes_left_behind) return;
  slots_.fit_to_steps(context);
}

TapeId Engine::open_tape(std::shared_ptr<ContextState> context) {
  give_back_of_ended();
  Operation::drop_now();  // before staging memory is allocated
  learn_times();
  slots_.tell_trouble(*context);
  const bool codes = prepare_coding(context->options);
  const bool is_alone = ledger_.live_tapes() == left_behind_count_;
  const TapeId tape = ledger_.open_tape();
  tapes_.grow_to(tape.index + size_t{1});
  TapeInfo& info = tapes_[tape.index];
  info = {};
  info.id = tape;
  info.context = std::move(context);
  info.number = ++tapes_opened_;
  info.was_alone = is_alone;
  info.codes = codes;
  times_.opened(tape, info.number);
  windows_.open(tape);
  const ContextOptions& options = info.context->options;
  const bool chooses_code = may_code(options) && options.compress == Compress::Auto && coded_.exists();
  windows_.set_limits(tape, lessons_.opened(tape, options.windows, options.learn, chooses_code));
  count_left_behind();
  ++Statistics::global().live_tapes;
  return tape;
}

void Engine::close_tape(TapeId id) {
  if (!ledger_.is_open(id)) return;
  const TapeInfo& info = tapes_[id.index];
  if (info.context->options.fraction < 1) info.context->eligible_bytes[this] = info.eligible_bytes;
  const uint64_t number = info.number;
  tell_closed(id);
  for (const Save& save : ledger_.tape(id).saves) {
    if (!ledger_.is_live(save.record)) continue;
    held(save.record).identity = {};
    held(save.record).wrappers.clear();
  }
  windows_.close(id, ledger_.tape(id).end_save());
  tapes_[id.index].fetch_place = ledger_.tape(id).end_save();
  if (ledger_.close_tape(id).gone) tape_is_gone(id);
  if (!is_inherited()) timeline_.note_close(number);  // may block
}

// Storages are looked at through weak references. A strong one could become the last one while another thread drops its
// own, and the storage would be freed here, in the middle of this loop over the ledger.
void Engine::tell_closed(TapeId id) {
  TapeInfo& info = tapes_[id.index];
  const bool learns = info.context->options.learn;
  const Tape& tape = ledger_.tape(id);
  std::vector<uint64_t> last_save(learns ? info.record_count : 0, 0);
  uint64_t next_number = 0;  // records are numbered in the order of their first saves
  for (uint64_t number = tape.first_save; number < tape.end_save(); ++number) {
    const RecordId record_id = tape.save(number).record;
    if (!ledger_.is_live(record_id)) continue;
    const HeldRecord& held = this->held(record_id);
    if (learns) last_save[held.number] = number;
    if (held.number < next_number) continue;
    next_number = held.number + uint64_t{1};
    const Record& record = ledger_.record(record_id);
    if (!held.identity || record.is_kept()) continue;
    const size_t owners = held.identity.share_count();
    const bool is_last_of_storage = record.next_same_storage == UINT32_MAX;
    if (owners == 0 && is_last_of_storage) count(info.row, &TapeRow::bytes_away, record.identity.nbytes);
    // Autograd's graph holds handles and no storage. The engine itself holds the storage while the source is still
    // here.
    const bool is_held = record.state == RecordState::Resident || record.state == RecordState::Offloading;
    if (learns && owners > (is_held ? 1U : 0U)) lessons_.outlived(held.identity);
  }
  lessons_.closed(id, std::move(last_save));
}

void Engine::tape_is_gone(TapeId id) {
  const TapeInfo& info = tapes_[id.index];
  const auto shape = info.has_backward_begun ? lessons_.shape(id) : std::nullopt;
  times_.gone(id, shape, info.record_count, lessons_.code(id), info.was_alone && info.number == tapes_opened_);
  lessons_.gone(id);
  count_left_behind();
  Statistics::global().tape_finished(info.row);
  --Statistics::global().live_tapes;
  tapes_[id.index] = {};
}

void Engine::count_left_behind() {
  const size_t now = lessons_.left_behind_count();
  Statistics::global().tapes_left_behind += now;
  Statistics::global().tapes_left_behind -= std::exchange(left_behind_count_, now);
}

void Engine::forget_learned_steps() {
  lessons_.clear();
  count_left_behind();
}

void Engine::append_live_rows(std::vector<TapeRow>& rows) const {
  for (const TapeInfo& tape : tapes_) {
    if (tape.context) rows.push_back(tape.row);
  }
}

// ---- times ----

void Engine::learn_times() {
  if (is_inherited()) return;
  const bool expected_coding = lessons_.expects_coding();
  while (auto taken = times_.take()) lessons_.learn_times(taken->shape, std::move(taken->times));
  if (expected_coding && !lessons_.expects_coding()) release_staging();
}

Timeline::Entry Engine::entry(EntryKind kind, RecordId id) {
  Timeline::Entry entry;
  if (!timeline_.is_on()) return entry;
  const Record& record = ledger_.record(id);
  entry.kind = kind;
  entry.is_kept = record.is_kept();
  entry.tape = tapes_[record.tape.index].number;
  entry.record = held(id).number;
  entry.nbytes = record.nbytes();
  entry.out_bytes = windows_.offload_bytes();
  entry.in_bytes = windows_.reload_bytes();
  return entry;
}

void Engine::mark(EntryKind kind, RecordId id, StreamId stream) {
  if (!timeline_.is_on() || backend_.streams.is_capturing()) return;
  Timeline::Entry moment = entry(kind, id);
  moment.begin = timeline_.now(stream);
  if (moment.begin.is_set()) timeline_.add(moment);
}

}  // namespace torchoffload
