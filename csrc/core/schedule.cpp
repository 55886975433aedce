#include "core/schedule.h"

#include <algorithm>

namespace torchoffload {

namespace {

// A window of a few of the largest record keeps the link busy while one of them is waited for; above a GiB more than
// one brings nothing that memory is worth.
constexpr uint64_t kDefaultWindowRecords = 4;
constexpr uint64_t kDefaultWindowCapBytes = uint64_t{1} << 30;

}  // namespace

void Schedule::saw_record(uint64_t nbytes) { largest_record_bytes_ = std::max(largest_record_bytes_, nbytes); }

uint64_t Schedule::default_window_bytes() const {
  return std::max(largest_record_bytes_,
                  std::min(kDefaultWindowRecords * largest_record_bytes_, kDefaultWindowCapBytes));
}

uint64_t Schedule::offload_window_bytes(const WindowOptions& options) const {
  if (options.offload_bytes) return *options.offload_bytes;
  if (options.offload_records) return *options.offload_records * largest_record_bytes_;
  return default_window_bytes();
}

uint64_t Schedule::reload_window_bytes(const WindowOptions& options) const {
  return options.reload_bytes.value_or(default_window_bytes());
}

Span Schedule::span_to_move(const Span& span, uint64_t storage_bytes) {
  return 2 * span.nbytes() >= storage_bytes ? Span{0, storage_bytes} : span;
}

std::vector<Schedule::Ahead> Schedule::take_reloads(Ledger& ledger, TapeId tape_id, uint64_t ahead_bytes,
                                                    uint64_t window_bytes) {
  std::vector<Ahead> taken;
  Tape& tape = ledger.tape(tape_id);
  const auto is_taken = [&](RecordId id) {
    return std::any_of(taken.begin(), taken.end(), [&](const Ahead& ahead) { return ahead.record == id; });
  };
  while (tape.reload_cursor > tape.first_save) {
    const uint64_t save = tape.reload_cursor - 1;
    const RecordId id = tape.save(save).record;
    if (ledger.is_live(id) && ledger.record(id).state == RecordState::Offloaded && !is_taken(id)) {
      const uint64_t nbytes = ledger.record(id).nbytes();
      if (ahead_bytes + nbytes > window_bytes) break;
      ahead_bytes += nbytes;
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
