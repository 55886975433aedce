#include "core/planning/tape_order.h"

#include <algorithm>
#include <utility>

namespace torchoffload {

bool TapeOrder::note(Event event) {
  const size_t place = events_.size();
  goes_as_last_ = goes_as_last_ && place < last_.size() && last_[place] == event;
  if (place < 2 * kTapeLimit) events_.push_back(event);
  return goes_as_last_;
}

uint64_t TapeOrder::opened(TapeId tape) {
  if (alive_.empty()) {
    begin_step(std::move(events_));
  } else {
    look_at_round();
  }
  const uint64_t number = next_number_++;
  alive_.push_back(number);
  const auto place = static_cast<uint32_t>(std::min(tapes_.size(), kTapeLimit));
  if (place < kTapeLimit) tapes_.push_back(tape);
  (void)note({place, false});
  return number;
}

void TapeOrder::begin_step(std::vector<Event> ended) {
  const bool had_backward = std::ranges::any_of(ended, &Event::is_backward);
  if (had_backward) last_ = std::move(ended);  // an evaluation, which has no backward, is not a step
  events_.clear();
  tapes_.clear();
  latest_.reset();
  first_number_ = next_number_;
  goes_as_last_ = last_.size() < 2 * kTapeLimit;
  round_alive_.clear();
}

// See Note [Tapes that are left behind].
void TapeOrder::look_at_round() {
  if (alive_.back() + 1 == next_number_) return;  // the latest tape is alive, so the round goes on
  if (round_alive_ != alive_) {
    round_alive_ = alive_;
    round_count_ = 0;
  } else if (!is_opening_expected()) {
    ++round_count_;
    std::optional<std::vector<Event>> round = latest_round();
    if (round && (*round == last_ || round_count_ >= rounds_until_left(alive_.size()))) {
      left_behind_.insert(left_behind_.end(), alive_.begin(), alive_.end());
      alive_.clear();
      return begin_step(*std::move(round));
    }
  }
  round_event_ = events_.size();
  round_number_ = next_number_;
}

std::optional<std::vector<TapeOrder::Event>> TapeOrder::latest_round() const {
  std::vector<Event> round(events_.begin() + static_cast<ptrdiff_t>(round_event_), events_.end());
  const uint64_t first_place = round_number_ - first_number_;
  const bool is_of_its_own = events_.size() < 2 * kTapeLimit &&
                             std::ranges::all_of(round, [&](const Event& event) { return event.tape >= first_place; });
  if (!is_of_its_own || std::ranges::none_of(round, &Event::is_backward)) return std::nullopt;
  for (Event& event : round) event.tape -= static_cast<uint32_t>(first_place);
  return round;
}

bool TapeOrder::is_opening_expected() const {
  return goes_as_last_ && events_.size() < last_.size() &&
         last_[events_.size()] == Event{static_cast<uint32_t>(tapes_.size()), false};
}

void TapeOrder::gone(uint64_t number) {
  std::erase(alive_, number);
  std::erase(left_behind_, number);
}

bool TapeOrder::backward_began(uint64_t number) {
  latest_ = number;
  if (number < first_number_) return false;  // the tape was left behind
  return note({static_cast<uint32_t>(std::min(number - first_number_, uint64_t{kTapeLimit})), true});
}

std::optional<TapeId> TapeOrder::coming(size_t places) const {
  if (!goes_as_last_) return std::nullopt;
  for (size_t place = events_.size(); place < last_.size(); ++place) {
    if (!last_[place].is_backward || places-- > 0) continue;
    const uint32_t tape = last_[place].tape;
    return tape < tapes_.size() ? std::optional(tapes_[tape]) : std::nullopt;
  }
  return std::nullopt;
}

bool TapeOrder::is_backward_next() const {
  return goes_as_last_ && events_.size() < last_.size() && last_[events_.size()].is_backward;
}

std::optional<bool> TapeOrder::is_own_backward_next(uint64_t number) const {
  if (!goes_as_last_ || events_.size() >= last_.size() || number < first_number_) return std::nullopt;
  return last_[events_.size()] == Event{static_cast<uint32_t>(number - first_number_), true};
}

}  // namespace torchoffload
