// Schedule: windows, prefetch order. It decides, never acts.
// Ownership:     none; it reads the ledger and returns ids.
// Thread safety: none; touched only with the GIL held.
// Not handled:   learning from one step for the next.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/ledger.h"

namespace torchoffload {

// What the user set; nullopt where it is to be chosen from what was seen.
struct WindowOptions {
  std::optional<uint64_t> offload_bytes;
  std::optional<uint64_t> offload_records;  // that many of the largest record
  std::optional<uint64_t> reload_bytes;
};

class Schedule {
 public:
  void saw_record(uint64_t nbytes);

  // Bytes that may be in flight. 0 means that every copy is waited for at once.
  uint64_t offload_window_bytes(const WindowOptions& options) const;
  uint64_t reload_window_bytes(const WindowOptions& options) const;

  // The bytes that move when the first save of a storage reaches `span`: the whole storage when the span is at least
  // half of it, else the span alone.
  static Span span_to_move(const Span& span, uint64_t storage_bytes);

  // The consumer asked for a save whose record was not on its way: reloads go on from there.
  static void consumer_missed(Tape& tape, uint64_t save) { tape.reload_cursor = save; }

  // The next records to reload ahead of the consumer, from the tape's end towards its start, while what is reloaded
  // and not yet asked for (`ahead_bytes`) stays within the window. Moves the tape's cursor past them.
  struct Ahead {
    RecordId record;
    uint64_t expected_at = 0;  // the save that asks for it first
  };
  static std::vector<Ahead> take_reloads(Ledger& ledger, TapeId tape, uint64_t ahead_bytes, uint64_t window_bytes);

  // Those of `ahead` (records reloaded ahead) that a consumer at `save` of their tape has passed by more than the
  // window.
  static std::vector<RecordId> passed_by(Ledger& ledger, TapeId tape, uint64_t save, const std::vector<RecordId>& ahead,
                                         uint64_t window_bytes);

 private:
  uint64_t default_window_bytes() const;

  uint64_t largest_record_bytes_ = 0;
};

}  // namespace torchoffload
