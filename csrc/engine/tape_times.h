// TapeTimes: which tapes are timed, and the times of the records and copies of one that was.
// Ownership:     borrows the timeline and the streams, which live for the process.
// Thread safety: needs the GIL. No call blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/planning/step.h"
#include "device/streams.h"
#include "engine/timeline.h"

namespace torchoffload {

class TapeTimes {
 public:
  TapeTimes(Streams& streams, Timeline& timeline) : streams_(streams), timeline_(timeline) {}

  // Tapes are known by their numbers in the timeline's entries.

  // A tape was opened. An older tape that is being timed, and is still alive after very many later ones were opened, is
  // timed no more.
  void opened(uint64_t number);

  // The tape's next record is about to be made; `is_first`: it is the tape's first one. Timing begins with the first
  // record if times are wanted, and stops at the first record for which they are not.
  void next(uint64_t number, bool is_first, bool wants_times);

  // The tape's last record was released. `shape`: the shape under which the tape was learned; nullopt: its times are of
  // no use.
  void gone(uint64_t number, std::optional<uint32_t> shape, size_t record_count);

  // Takes the times of the earliest timed tape that is gone. nullopt: there is none, or the device has not reached its
  // end yet. Asks the device only while there is such a tape.
  struct Taken {
    uint32_t shape = 0;
    StepTimes times;
  };
  std::optional<Taken> take();

 private:
  // A tape that is alive and timed.
  struct Timed {
    uint64_t number = 0;
    uint64_t first_entry = 0;
  };
  // A timed tape that is gone. The device may not have reached its end yet.
  struct Gone {
    uint32_t shape = 0;
    uint64_t number = 0;
    size_t record_count = 0;
    uint64_t first_entry = 0;
    uint64_t end_entry = 0;
  };
  // One timed tape less: entries that no other one wants are forgotten.
  void stop_timing();
  // The tape among those that are timed.
  std::vector<Timed>::iterator find(uint64_t number);
  // Computes the times of a tape from the timeline's entries, and updates the link's rates from its copies. The time in
  // which a stream waited for us is subtracted.
  StepTimes times_of(const Gone& tape);

  Streams& streams_;
  Timeline& timeline_;
  std::vector<Timed> timed_;
  std::deque<Gone> gone_;
  LinkRates link_;  // as measured last
};

}  // namespace torchoffload
