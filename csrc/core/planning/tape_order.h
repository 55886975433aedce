// TapeOrder: the order in which a step opens its tapes and asks for them, as learned from earlier steps. So if several
// tapes are alive at once (micro-batches, pipeline stages) the next one's end can be reloaded while one is still used.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
//
// A step begins when a tape is opened while no other is alive. The orders of the latest steps are known that differ from
// each other: a loop may train networks in turns. A step is predicted to go on as the latest known one that it has gone
// as so far. Once its order differs from those of all known steps, nothing more is predicted for it.
//
// Note [Tapes that are left behind]
// One graph that is kept alive (a rollout, the forward of an evaluation) must not join all later tapes into one endless
// step. So each time that a tape is opened while others are alive, and a later tape than these has gone already, a
// round ends. If the same tapes are alive at the end of each round, each round may be a step of its own. A round is
// taken for a step at once if its order is that of the latest known step, and otherwise after a few such rounds; but
// never while the opened tape is the one that a known step predicts. The tapes that are alive then are left behind:
// they belong to no step any more. In a step of a pipeline with several chunks the tapes of the first chunk are alive
// during the others, too, but there are at least as many of them as rounds. If more than a few inner steps run beside a
// forward (an encoder's, say), that forward is taken for one that is kept.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/types.h"

namespace torchoffload {

class TapeOrder {
 public:
  static constexpr size_t kTapeLimit = 4096;  // a step with more tapes is not learned
  static constexpr size_t kKnownLimit = 8;    // so many steps are known at once

  // The number of rounds that must end with the same tapes alive, until these tapes are left behind.
  static size_t rounds_until_left(size_t alive_count) { return alive_count + 2; }

  // A tape was opened. Returns its number, in the order of opening.
  uint64_t opened(TapeId tape);

  // The tape's last record was released.
  void gone(uint64_t number);

  // A backward asked for the tape for the first time. Returns whether that was expected, and so was all that came
  // behind the backward before it.
  bool backward_began(uint64_t number);

  // Was this tape's backward the latest to begin?
  bool is_latest(uint64_t number) const { return latest_ == number; }

  // The tape that is expected to be asked for `places` after the next one; nullopt: not known, or not opened yet.
  std::optional<TapeId> coming(size_t places) const;

  // Is a backward expected next, whichever of the known steps this one turns out to be? Records that come ahead of a
  // backward, and find another forward there, take memory beside it that nothing counts.
  bool is_backward_next() const;
  // Is this tape's backward expected next? nullopt: not known.
  std::optional<bool> is_own_backward_next(uint64_t number) const;

  // Tapes that are alive and belong to no step any more.
  size_t left_behind_count() const { return left_behind_.size(); }

 private:
  struct Event {
    uint32_t tape = 0;  // by its place in the step
    bool is_backward = false;
    friend bool operator==(const Event&, const Event&) = default;
  };
  // Adds an event to this step.
  void note(Event event);
  // Does this step, which goes as a known one so far, go on with this event if it goes as that one?
  bool would_be_next(size_t known, Event event) const;
  // The known step that this one is predicted to go on as; nullptr: there is none.
  const std::vector<Event>* predicted() const { return alike_.empty() ? nullptr : &known_[alike_.front()]; }
  // Begins a step; `ended` are the events of the one before.
  void begin_step(std::vector<Event> ended);
  // Called when a tape is opened while others are alive: ends a round, and perhaps leaves tapes behind.
  void look_at_round();
  // The events since the round began, as those of a step of its own; nullopt: they cannot be a step.
  std::optional<std::vector<Event>> latest_round() const;
  // Does a known step that this one goes as predict the opening of another tape now?
  bool is_opening_expected() const;

  std::vector<TapeId> tapes_;    // of this step, in the order of opening
  uint64_t first_number_ = 0;    // of the step's first tape
  uint64_t next_number_ = 0;     // of the next tape
  std::vector<uint64_t> alive_;  // of this step, by number
  std::vector<uint64_t> left_behind_;
  std::vector<Event> events_;              // of this step
  std::vector<std::vector<Event>> known_;  // of earlier steps that differ, the latest first
  std::vector<size_t> alike_;              // the known steps that this one goes as, by number, the latest first
  bool has_differed_ = false;              // an event since the latest backward was not the predicted one
  std::optional<uint64_t> latest_;

  // See Note [Tapes that are left behind].
  std::vector<uint64_t> round_alive_;  // the tapes that were alive when the round began
  size_t round_event_ = 0;             // the place of the round's first event in events_
  uint64_t round_number_ = 0;          // the number of the round's first tape
  size_t round_count_ = 0;             // how many rounds in a row had the same tapes alive
};

}  // namespace torchoffload
