// windows_model.h: what CopyWindows may say of reloads, told by looking at each save of the tape.
#pragma once

#include <algorithm>
#include <vector>

#include "core/tape_records.h"
#include "core/windows.h"
#include "driver.h"
#include "ledger_model.h"

namespace torchoffload::fuzz {

class WindowsModel {
 public:
  WindowsModel(Ledger& ledger, LedgerModel& model) : ledger_(ledger), model_(model) {}

  // Takes reloads, and checks them. `ahead_bytes` are reloaded already.
  std::vector<CopyWindows::Ahead> take_reloads(CopyWindows& windows, TapeWindows& its, TapeId id, uint64_t ahead_bytes,
                                               uint64_t window_bytes) {
    const Tape& tape = ledger_.tape(id);
    its.set_limits({0, window_bytes});
    const uint64_t began_at = its.reload_place();
    expect(began_at <= tape.end_save(), "reloads begin behind the tape's end");
    const auto taken = windows.take_reloads(its, ahead_bytes, AtSource::GoesOn, TapeRecords(ledger_, id));
    uint64_t taken_bytes = 0;
    uint64_t last_save = began_at;
    for (const auto& [record, save] : taken) {
      expect(waits_for_reload(tape, save) && tape.save(save).record == record, "a reload for a save of another record");
      expect(save < last_save, "reloads do not go from the last save to the first");
      last_save = save;
      taken_bytes += model_.holding(record).span.nbytes();
    }
    expect(taken_bytes == 0 || ahead_bytes + taken_bytes <= window_bytes, "more is loaded ahead than the window holds");
    const auto is_taken = [&](RecordId record) {
      return std::any_of(taken.begin(), taken.end(), [&](const auto& ahead) { return ahead.record == record; });
    };
    const uint64_t came_to = its.reload_place();
    for (uint64_t save = came_to; save < began_at; ++save)
      expect(!waits_for_reload(tape, save) || is_taken(tape.save(save).record), "reloads went on past a record");
    if (came_to > tape.first_save) {
      expect(waits_for_reload(tape, came_to - 1), "reloads end before the window is full");
      const uint64_t more_bytes = model_.holding(tape.save(came_to - 1).record).span.nbytes();
      expect(ahead_bytes + taken_bytes + more_bytes > window_bytes, "reloads end before the window is full");
    }
    return taken;
  }

  // Which of `ahead` a consumer at `save` has passed by, checked.
  std::vector<RecordId> passed_by(TapeId id, uint64_t save, const std::vector<RecordId>& ahead, uint64_t window_bytes) {
    const Tape& tape = ledger_.tape(id);
    CopyWindows windows;
    TapeWindows its;
    its.set_limits({0, window_bytes});
    for (const RecordId each : ahead) windows.reload_began(each, 0);
    const auto passed = windows.passed_by(its, save, TapeRecords(ledger_, id));
    for (const RecordId each : ahead) {
      const bool is_passed = std::find(passed.begin(), passed.end(), each) != passed.end();
      const bool is_here = ledger_.is_live(each) && model_.holding(each).tape == id;
      const uint64_t expected_at = is_here ? ledger_.record(each).expected_at : 0;
      const bool is_far = is_here && expected_at > save &&
                          tape.save(expected_at).bytes_before - tape.save(save).bytes_before > window_bytes;
      expect(is_passed == is_far, "passed by, and yet to come, or the reverse");
    }
    return passed;
  }

 private:
  bool waits_for_reload(const Tape& tape, uint64_t save) {
    const RecordId id = tape.save(save).record;
    return ledger_.is_live(id) && model_.holding(id).state == RecordState::Offloaded;
  }

  Ledger& ledger_;
  LedgerModel& model_;
};

}  // namespace torchoffload::fuzz
