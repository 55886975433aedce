// Statistics: counts of moved and of kept records, per tape and in total since the last reset.
// Ownership:     the rows of the last kRowLimit tapes that have finished, the newest last.
// Thread safety: needs the GIL.
#pragma once

#include <array>
#include <cstdint>
#include <deque>

#include "core/ledger.h"
#include "system/gil.h"

namespace torchoffload {

struct TapeRow {
  uint64_t records_offloaded = 0, bytes_offloaded = 0;
  uint64_t records_reloaded = 0, bytes_reloaded = 0;
  uint64_t records_deduplicated = 0, bytes_deduplicated = 0;
  std::array<uint64_t, kReasonCount> records_kept{}, bytes_kept{};
  uint64_t bytes_away = 0;     // device memory that the tape had freed when it closed
  uint64_t bytes_at_once = 0;  // the most bytes of records that one operator saved
  uint64_t window_waits = 0;
  uint64_t passed_by = 0;
};

// The saves inside one module of offload_modules. A record counts for the module that saved it first.
struct ModuleRow {
  uint64_t records_offloaded = 0, bytes_offloaded = 0;
  std::array<uint64_t, kReasonCount> records_kept{}, bytes_kept{};
};

struct Statistics {
  static constexpr size_t kRowLimit = 64;

  TapeRow totals;
  uint64_t handles = 0;  // saved tensors seen
  uint64_t live_handles = 0, live_records = 0, live_slots = 0, live_tapes = 0;
  uint64_t tapes_left_behind = 0;  // live tapes that belong to no step any more; see TapeOrder
  uint64_t slot_bytes = 0, peak_slot_bytes = 0;
  uint64_t peak_pinned_bytes = 0;
  uint64_t charged_bytes = 0;  // the bytes of slots, charged to all budgets together
  uint64_t peak_offload_window_bytes = 0, peak_reload_window_bytes = 0;
  std::deque<TapeRow> finished;

  // Process-wide; leaked on purpose.
  static Statistics& global() REQUIRES(gil);

  void tape_finished(const TapeRow& row);
  void slot_acquired(uint64_t nbytes);
  void slot_released(uint64_t nbytes);
  void saw_offload_window(uint64_t nbytes);  // so many bytes were on their way out
  // Sets totals, peaks and rows to zero. The counts of live records stay.
  void reset();
};

// Adds `amount` to one field of a row, and to the same field of the totals.
template <typename Field>
void count(TapeRow& row, Field field, uint64_t amount) REQUIRES(gil) {
  row.*field += amount;
  Statistics::global().totals.*field += amount;
}
// Counts a kept record for a row, for the totals, and for `module` unless that is null.
void count_kept(TapeRow& row, ModuleRow* module, Reason reason, uint64_t nbytes) REQUIRES(gil);

}  // namespace torchoffload
