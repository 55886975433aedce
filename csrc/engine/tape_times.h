// TapeTimes: which tapes are timed, and what the timeline says of one that is.
// Ownership:     borrows the timeline and the streams, which live for the process.
// Thread safety: needs the GIL. Blocks nowhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "core/chunked_vector.h"
#include "core/step.h"
#include "core/types.h"
#include "device/streams.h"
#include "engine/timeline.h"

namespace torchoffload {

class TapeTimes {
 public:
  TapeTimes(Streams& streams, Timeline& timeline) : streams_(streams), timeline_(timeline) {}

  // `number`: of the tape, as the timeline's entries name it. Tapes that are timed and have outlived very many later
  // ones are timed no more.
  void opened(TapeId tape, uint64_t number);

  // A record comes. `is_first`: of its tape. Timing begins with the first one where times are wanted, and is given up
  // where they are not wanted any more.
  void next(TapeId tape, bool is_first, bool wants_times);

  // The tape is gone. `shape`: what it was learned as; nullopt: its times are of no use.
  void gone(TapeId tape, std::optional<uint32_t> shape, size_t record_count);

  // The times of the earliest tape that has gone and whose times were not taken yet; nullopt: there is none, or the
  // device has not come to its end. Asks the device only while there is such a tape.
  struct Taken {
    uint32_t shape = 0;
    StepTimes times;
  };
  std::optional<Taken> take();

 private:
  struct OfTape {
    uint64_t number = 0;
    uint64_t first_entry = 0;
    bool is_timed = false;
  };
  // A timed tape that is gone, whose times the device may not have come to yet.
  struct Gone {
    uint32_t shape = 0;
    uint64_t number = 0;
    size_t record_count = 0;
    uint64_t first_entry = 0;
    uint64_t end_entry = 0;
  };
  void give_up(OfTape& tape);
  StepTimes times_of(const Gone& tape);

  Streams& streams_;
  Timeline& timeline_;
  ChunkedVector<OfTape> tapes_;  // by tape index
  std::deque<Gone> gone_;
  LinkRates link_;  // as last measured
};

}  // namespace torchoffload
