// Schedule: what moves of a storage, prefetch order. It decides, never acts.
// Ownership:     none; it reads the ledger and returns ids.
// Thread safety: none; touched only with the GIL held.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/ledger.h"

namespace torchoffload {

// What of a storage moves with a save: the span that it reaches, or all.
enum class Extent : uint8_t { Span, Storage };

class Schedule {
 public:
  // The bytes that move when the first save of a storage reaches `span`: the whole storage when the span is at least
  // half of it, else the span alone.
  static Span span_to_move(const Span& span, uint64_t storage_bytes);

  // Note [Small views]
  // A kept view pins all of its storage, so what counts against the minimum is the storage: of one that is large enough
  // a view of a few bytes moves alone. Where the tape keeps that storage anyway, moving a view would free nothing. And
  // where it saves many small views of one storage, the first few move alone, and then one copy of all serves the rest,
  // once: so of a storage that lives on elsewhere, such as a table of positions, never more moves for nothing than its
  // own bytes and those few. From the third tape on such a storage is known, and stays.
  static constexpr uint32_t kSmallViewsAlone = 8;

  // What moves for a view below the minimum that no record stands for; nullopt: nothing.
  static std::optional<Extent> extent_of_small_view(const Ledger::OfStorage& known);

  // Where the consumer is: the later of the last two saves that it asked for. Once far ahead is not yet gone on: a
  // checkpoint asks for its input before it asks for what was saved behind that.
  static uint64_t place_of(uint64_t save, uint64_t save_before) { return std::max(save, save_before); }

  // The consumer, which is at `place`, asked for a save whose record was not on its way: reloads go on from there.
  static void consumer_missed(Tape& tape, uint64_t save, uint64_t place) {
    tape.reload_cursor = save < tape.reload_cursor ? std::min(tape.reload_cursor, place) : save;
  }

  // The next records to reload ahead of the consumer, from the tape's end towards its start, while what is held for it
  // (`held_bytes`: reloaded and not yet asked for, or kept) stays within the window. Moves the tape's cursor past them.
  // `stops_at_source`: not past a record that is to be moved and is still here.
  struct Ahead {
    RecordId record;
    uint64_t expected_at = 0;  // the save that asks for it first
  };
  static std::vector<Ahead> take_reloads(Ledger& ledger, TapeId tape, uint64_t held_bytes, uint64_t window_bytes,
                                         bool stops_at_source = false);

  // Those of `ahead` (records reloaded ahead) that a consumer at `save` of their tape has passed by more than the
  // window.
  static std::vector<RecordId> passed_by(Ledger& ledger, TapeId tape, uint64_t save, const std::vector<RecordId>& ahead,
                                         uint64_t window_bytes);
};

}  // namespace torchoffload
