// TapeOrder: in which order a step's tapes are opened and asked for, learned from the step before. So where several are
// alive at once (micro-batches, pipeline stages) the next one's end can be on its way back while one is still used.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// A step begins where a tape is opened and no other is alive. Where it goes another way than the last one did, nothing
// more is expected of it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/types.h"

namespace torchoffload {

class TapeOrder {
 public:
  static constexpr size_t kTapeLimit = 4096;  // of a step; past it nothing is expected, nor learned

  // Returns the tape's number in its step. `is_step_begin`: no other tape is alive.
  uint32_t opened(TapeId tape, bool is_step_begin);

  // The first unpack of its backward. Returns whether that was expected.
  bool backward_began(uint32_t number);

  // Was this tape's backward the latest to begin?
  bool is_latest(uint32_t number) const { return latest_ == number; }

  // The tape that is expected to be asked for `places` after the next one; nullopt: not known, or not opened yet.
  std::optional<TapeId> coming(size_t places) const;

  // Is a backward the next thing to be expected? And this tape's? nullopt: not known.
  bool is_backward_next() const;
  std::optional<bool> is_own_backward_next(uint32_t number) const;

 private:
  struct Event {
    uint32_t tape = 0;
    bool is_backward = false;
    friend bool operator==(const Event&, const Event&) = default;
  };
  bool note(Event event);

  std::vector<TapeId> tapes_;  // of this step, by number
  std::vector<Event> events_;  // of this step
  std::vector<Event> last_;    // of the step before
  bool goes_as_last_ = false;
  std::optional<uint32_t> latest_;
};

}  // namespace torchoffload
