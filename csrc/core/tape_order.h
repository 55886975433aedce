// TapeOrder: in which order a step's tapes are opened and asked for, learned from the step before. So where several are
// alive at once (micro-batches, pipeline stages) the next one's end can be on its way back while one is still used.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
//
// A step begins where a tape is opened and no other is alive. Where it goes another way than the last one did, nothing
// more is expected of it.
//
// Note [Tapes that are left behind]
// One graph that is kept alive (a rollout, the forward of an evaluation) must not make one endless step of all that
// follows. So the openings are looked at where the tapes that are alive are older than one that has gone already. While
// the tapes alive there are the same each time, each time round may be a step of its own. It is one at once where it
// goes as the last known step went, and else after a few rounds; never while the tape is opened as the last step says.
// What is alive then is left behind: it belongs to no step any more. In a pipeline's step with several chunks the tapes
// of the first chunk are alive meanwhile, too, but there are as many of them as rounds, or more. A forward that more
// than a few inner steps run beside (an encoder's, say) is taken for one that is kept.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/types.h"

namespace torchoffload {

class TapeOrder {
 public:
  static constexpr size_t kTapeLimit = 4096;  // of a step; past it nothing is expected, nor learned

  // How often the same tapes must be found alive, with others come and gone meanwhile, to be left behind.
  static size_t rounds_until_left(size_t alive_count) { return alive_count + 2; }

  // Returns the tape's number, in the order of opening.
  uint64_t opened(TapeId tape);

  // The tape has gone.
  void gone(uint64_t number);

  // The first unpack of its backward. Returns whether that was expected.
  bool backward_began(uint64_t number);

  // Was this tape's backward the latest to begin?
  bool is_latest(uint64_t number) const { return latest_ == number; }

  // The tape that is expected to be asked for `places` after the next one; nullopt: not known, or not opened yet.
  std::optional<TapeId> coming(size_t places) const;

  // Is a backward the next thing to be expected? And this tape's? nullopt: not known.
  bool is_backward_next() const;
  std::optional<bool> is_own_backward_next(uint64_t number) const;

  // Tapes that are alive and belong to no step any more.
  size_t left_behind_count() const { return left_behind_.size(); }

 private:
  struct Event {
    uint32_t tape = 0;  // by its place in the step
    bool is_backward = false;
    friend bool operator==(const Event&, const Event&) = default;
  };
  bool note(Event event);
  void begin_step(std::vector<Event> ended);
  void look_at_round();
  std::optional<std::vector<Event>> latest_round() const;
  bool is_opening_expected() const;

  std::vector<TapeId> tapes_;    // of this step, in their order
  uint64_t first_number_ = 0;    // of the step's first tape
  uint64_t next_number_ = 0;     // of the next tape
  std::vector<uint64_t> alive_;  // of this step, by number
  std::vector<uint64_t> left_behind_;
  std::vector<Event> events_;  // of this step
  std::vector<Event> last_;    // of the step before
  bool goes_as_last_ = false;
  std::optional<uint64_t> latest_;

  // See Note [Tapes that are left behind].
  std::vector<uint64_t> round_alive_;  // what was alive as the round began
  size_t round_event_ = 0;             // the first of the round
  uint64_t round_number_ = 0;          // of the round's first tape
  size_t round_count_ = 0;             // of those with the same tapes alive
};

}  // namespace torchoffload
