// TapeRecords: answers the questions of CopyWindows about the records of one closed tape of a ledger.
// Ownership:     borrows the ledger; it is made for one call and not stored.
// Thread safety: none; touched only with the GIL held.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "core/ledger.h"
#include "core/windows.h"

namespace torchoffload {

class TapeRecords {
 public:
  // Is the record's slot in memory? Asked of records in slots; null: each slot is.
  using IsHere = std::function<bool(RecordId)>;

  TapeRecords(Ledger& ledger, TapeId id, const IsHere* is_here = nullptr)
      : ledger_(ledger), id_(id), tape_(ledger.tape(id)), is_here_(is_here) {}

  uint64_t first_save() const { return tape_.first_save; }

  SavedRecord at(uint64_t save) const {
    const RecordId id = tape_.save(save).record;
    if (!ledger_.is_live(id)) return {id, Rests::Neither, 0};
    const Record& record = ledger_.record(id);
    const Rests where = rests(record);
    const bool is_away = where == Rests::InSlot && is_here_ != nullptr && !(*is_here_)(id);
    return {id, is_away ? Rests::OnItsWay : where, record.nbytes()};
  }

  std::optional<uint64_t> bytes_behind(RecordId id, uint64_t save) const {
    if (!ledger_.is_live(id)) return std::nullopt;
    const Record& record = ledger_.record(id);
    if (record.tape != id_ || record.expected_at <= save) return std::nullopt;
    return tape_.save(record.expected_at).bytes_before - tape_.save(save).bytes_before;
  }

 private:
  static Rests rests(const Record& record) {
    if (record.state == RecordState::Offloaded) return Rests::InSlot;
    const bool is_source_here = record.state == RecordState::Resident || record.state == RecordState::Offloading;
    return is_source_here && !record.is_kept() ? Rests::AtSource : Rests::Neither;
  }

  Ledger& ledger_;
  const TapeId id_;
  const Tape& tape_;
  const IsHere* const is_here_;
};

}  // namespace torchoffload
