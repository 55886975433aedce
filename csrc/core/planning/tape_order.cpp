#include "core/planning/tape_order.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace torchoffload {

bool TapeOrder::would_be_next(size_t known, Event event) const {
  return events_.size() < known_[known].size() && known_[known][events_.size()] == event;
}

void TapeOrder::note(Event event) {
  has_differed_ = has_differed_ || alike_.empty() || !would_be_next(alike_.front(), event);
  std::erase_if(alike_, [&](size_t known) { return !would_be_next(known, event); });
  if (events_.size() < 2 * kTapeLimit) events_.push_back(event);
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
  note({place, false});
  return number;
}

void TapeOrder::begin_step(std::vector<Event> ended) {
  const bool had_backward = std::ranges::any_of(ended, &Event::is_backward);
  if (had_backward && ended.size() < 2 * kTapeLimit) {  // an evaluation, which has no backward, is not a step
    std::erase(known_, ended);
    known_.insert(known_.begin(), std::move(ended));
    if (known_.size() > kKnownLimit) known_.pop_back();
  }
  alike_.resize(known_.size());
  std::iota(alike_.begin(), alike_.end(), size_t{0});
  has_differed_ = false;
  events_.clear();
  tapes_.clear();
  latest_.reset();
  first_number_ = next_number_;
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
    const bool is_known = round && !known_.empty() && *round == known_.front();
    if (is_known || (round && round_count_ >= rounds_until_left(alive_.size()))) {
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
  const Event opening{static_cast<uint32_t>(tapes_.size()), false};
  return std::ranges::any_of(alike_, [&](size_t known) { return would_be_next(known, opening); });
}

void TapeOrder::gone(uint64_t number) {
  std::erase(alive_, number);
  std::erase(left_behind_, number);
}

bool TapeOrder::backward_began(uint64_t number) {
  latest_ = number;
  if (number < first_number_) return false;  // the tape was left behind
  note({static_cast<uint32_t>(std::min(number - first_number_, uint64_t{kTapeLimit})), true});
  return !std::exchange(has_differed_, false);
}

std::optional<TapeId> TapeOrder::coming(size_t places) const {
  const std::vector<Event>* step = predicted();
  if (step == nullptr) return std::nullopt;
  for (size_t place = events_.size(); place < step->size(); ++place) {
    if (!(*step)[place].is_backward || places-- > 0) continue;
    const uint32_t tape = (*step)[place].tape;
    return tape < tapes_.size() ? std::optional(tapes_[tape]) : std::nullopt;
  }
  return std::nullopt;
}

bool TapeOrder::is_backward_next() const {
  const auto predicts_backward = [&](size_t known) {
    return events_.size() < known_[known].size() && known_[known][events_.size()].is_backward;
  };
  return !alike_.empty() && std::ranges::all_of(alike_, predicts_backward);
}

std::optional<bool> TapeOrder::is_own_backward_next(uint64_t number) const {
  const std::vector<Event>* step = predicted();
  if (step == nullptr || events_.size() >= step->size() || number < first_number_) return std::nullopt;
  return (*step)[events_.size()] == Event{static_cast<uint32_t>(number - first_number_), true};
}

}  // namespace torchoffload
