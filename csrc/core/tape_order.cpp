#include "core/tape_order.h"

#include <algorithm>
#include <utility>

namespace torchoffload {

bool TapeOrder::note(Event event) {
  const size_t place = events_.size();
  goes_as_last_ = goes_as_last_ && place < last_.size() && last_[place] == event;
  if (place < 2 * kTapeLimit) events_.push_back(event);
  return goes_as_last_;
}

uint32_t TapeOrder::opened(TapeId tape, bool is_step_begin) {
  if (is_step_begin) {
    const bool had_backward =
        std::any_of(events_.begin(), events_.end(), [](Event event) { return event.is_backward; });
    if (had_backward) last_ = std::move(events_);  // an evaluation in between is no step
    events_.clear();
    tapes_.clear();
    latest_.reset();
    goes_as_last_ = last_.size() < 2 * kTapeLimit;
  }
  const auto number = static_cast<uint32_t>(std::min(tapes_.size(), kTapeLimit));
  if (number < kTapeLimit) tapes_.push_back(tape);
  (void)note({number, false});
  return number;
}

bool TapeOrder::backward_began(uint32_t number) {
  latest_ = number;
  return note({number, true});
}

std::optional<TapeId> TapeOrder::coming(size_t places) const {
  if (!goes_as_last_) return std::nullopt;
  for (size_t place = events_.size(); place < last_.size(); ++place) {
    if (!last_[place].is_backward || places-- > 0) continue;
    const uint32_t number = last_[place].tape;
    return number < tapes_.size() ? std::optional(tapes_[number]) : std::nullopt;
  }
  return std::nullopt;
}

bool TapeOrder::is_backward_next() const {
  return goes_as_last_ && events_.size() < last_.size() && last_[events_.size()].is_backward;
}

std::optional<bool> TapeOrder::is_own_backward_next(uint32_t number) const {
  if (!goes_as_last_ || events_.size() >= last_.size()) return std::nullopt;
  return last_[events_.size()] == Event{number, true};
}

}  // namespace torchoffload
