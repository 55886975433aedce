#include "core/schedule.h"

#include <algorithm>

namespace torchoffload {

Span Schedule::span_to_move(const Span& span, uint64_t storage_bytes) {
  return 2 * span.nbytes() >= storage_bytes ? Span{0, storage_bytes} : span;
}

std::optional<Extent> Schedule::extent_of_small_view(const Ledger::OfStorage& known) {
  if (known.is_kept) return std::nullopt;
  if (known.records < kSmallViewsAlone) return Extent::Span;
  return known.has_whole ? std::nullopt : std::optional(Extent::Storage);
}

namespace {

bool is_source_here(const Record& record) {
  return record.kept == KeptReason::None &&
         (record.state == RecordState::Resident || record.state == RecordState::Offloading);
}

}  // namespace

std::vector<Schedule::Ahead> Schedule::take_reloads(Ledger& ledger, TapeId tape_id, uint64_t held_bytes,
                                                    uint64_t window_bytes, bool stops_at_source) {
  std::vector<Ahead> taken;
  Tape& tape = ledger.tape(tape_id);
  const auto is_taken = [&](RecordId id) {
    return std::any_of(taken.begin(), taken.end(), [&](const Ahead& ahead) { return ahead.record == id; });
  };
  while (tape.reload_cursor > tape.first_save) {
    const uint64_t save = tape.reload_cursor - 1;
    const RecordId id = tape.save(save).record;
    if (stops_at_source && ledger.is_live(id) && is_source_here(ledger.record(id))) break;
    if (ledger.is_live(id) && ledger.record(id).state == RecordState::Offloaded && !is_taken(id)) {
      const uint64_t nbytes = ledger.record(id).nbytes();
      if (held_bytes + nbytes > window_bytes) break;
      held_bytes += nbytes;
      taken.push_back({id, save});
    }
    --tape.reload_cursor;
  }
  return taken;
}

std::vector<RecordId> Schedule::passed_by(Ledger& ledger, TapeId tape_id, uint64_t save,
                                          const std::vector<RecordId>& ahead, uint64_t window_bytes) {
  std::vector<RecordId> passed;
  const Tape& tape = ledger.tape(tape_id);
  const uint64_t consumer = tape.save(save).bytes_before;
  for (const RecordId id : ahead) {
    if (!ledger.is_live(id)) continue;
    const Record& record = ledger.record(id);
    const bool is_behind = record.tape == tape_id && record.expected_at > save;
    if (is_behind && tape.save(record.expected_at).bytes_before - consumer > window_bytes) passed.push_back(id);
  }
  return passed;
}

}  // namespace torchoffload
