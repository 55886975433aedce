#include "core/windows.h"

namespace torchoffload {

void Windows::open(TapeId tape) {
  if (tapes_.size() <= tape.index) tapes_.resize(tape.index + size_t{1});
  tapes_[tape.index] = {};
}

void Windows::reload_began(RecordId id, uint64_t nbytes) {
  ahead_.push_back(id);
  reload_bytes_ += nbytes;
}

void Windows::reload_left(RecordId id, uint64_t nbytes) {
  reload_bytes_ -= nbytes;
  std::erase(ahead_, id);
}

void Windows::consumer_missed(TapeId tape, uint64_t save, uint64_t place) {
  uint64_t& reload_place = of(tape).reload_place;
  reload_place = save < reload_place ? std::min(reload_place, place) : save;
}

}  // namespace torchoffload
