#include "engine/statistics.h"

#include <algorithm>

namespace torchoffload {

Statistics& Statistics::global() {
  static Statistics* const leaked = new Statistics;
  return *leaked;
}

void Statistics::tape_finished(const TapeRow& row) {
  finished.push_back(row);
  if (finished.size() > kRowLimit) finished.pop_front();
}

void Statistics::slot_acquired(uint64_t nbytes) {
  ++live_slots;
  slot_bytes += nbytes;
  peak_slot_bytes = std::max(peak_slot_bytes, slot_bytes);
}

void Statistics::slot_released(uint64_t nbytes) {
  --live_slots;
  slot_bytes -= nbytes;
}

void Statistics::saw_offload_window(uint64_t nbytes) {
  peak_offload_window_bytes = std::max(peak_offload_window_bytes, nbytes);
}

void Statistics::reset() {
  totals = {};
  handles = 0;
  finished.clear();
  peak_slot_bytes = slot_bytes;
  peak_offload_window_bytes = peak_reload_window_bytes = 0;
  peak_pinned_bytes = 0;  // stats() raises it to the bytes held now
}

void count_kept(TapeRow& row, ModuleRow* module, Reason reason, uint64_t nbytes) {
  const auto index = static_cast<size_t>(reason);
  const auto count_in = [&](auto& counted) {
    ++counted.records_kept[index];
    counted.bytes_kept[index] += nbytes;
  };
  count_in(row);
  count_in(Statistics::global().totals);
  if (module != nullptr) count_in(*module);
}

}  // namespace torchoffload
