#include "engine/timeline.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/operation.h"

namespace torchoffload {

const char* to_string(EntryKind kind) {
  switch (kind) {
    case EntryKind::Ready:
      return "ready";
    case EntryKind::Needed:
      return "needed";
    case EntryKind::CopyOut:
      return "copy_out";
    case EntryKind::CopyIn:
      return "copy_in";
    case EntryKind::WindowWait:
      return "window_wait";
    case EntryKind::ReloadWait:
      return "reload_wait";
    case EntryKind::DropWait:
      return "drop_wait";
    case EntryKind::Closed:
      return "closed";
  }
  return "?";
}

void Timeline::start() { ++wanted_; }

Timeline::~Timeline() {
  forget_unread();
  for (const TimedPoint point : {origin_, profile_origin_}) streams_.release(point);
  for (const Close& close : closes_) streams_.release(close.entry.begin);
}

TimedPoint Timeline::record(StreamId stream) {
  std::optional<BlockingSection> blocking;
  if (streams_.may_block(stream)) blocking.emplace();
  return streams_.record_timed(stream);
}

void Timeline::set_origin() {
  if (!is_on() || origin_.is_set() || !streams_.tells_time()) return;
  const TimedPoint origin = record(streams_.current_stream());
  if (is_on() && !origin_.is_set()) {
    origin_ = origin;
  } else {  // another thread has set it meanwhile, or the timeline was turned off
    streams_.release(origin);
  }
}

TimedPoint Timeline::now(StreamId stream) {
  set_origin();
  return record(stream);
}

void Timeline::stop() {
  if (--wanted_ > 0) return;
  forget_unread();
  entries_.clear();
  first_entry_ = read_count_ = 0;
  streams_.release(origin_);
  origin_ = {};
}

void Timeline::start_profile() {
  if (is_profiled_ || !streams_.tells_time()) return;
  start();
  is_profiled_ = true;
  profile_begin_ = entry_count();
  profile_origin_ = now(streams_.current_stream());
}

void Timeline::note_close(uint64_t tape) {
  if (!is_profiled_ || streams_.is_capturing()) return;
  Entry entry;
  entry.kind = EntryKind::Closed;
  entry.tape = tape;
  try {
    entry.device_bytes = memory_.allocated_bytes();
    entry.begin = now(streams_.current_stream());
    if (!is_profiled_) return streams_.release(entry.begin);  // profile() was turned off while this call waited
    closes_.push_back({entry_count(), entry});
  } catch (...) {  // tapes close in destructors, too; a failing device raises again at the next call that can report it
  }
}

bool Timeline::read_profile() {
  const auto is_reached = [&](TimedPoint point) { return streams_.seconds_between(origin_, point).has_value(); };
  return read() == entry_count() && is_reached(profile_origin_) &&
         std::all_of(closes_.begin(), closes_.end(), [&](const Close& close) { return is_reached(close.entry.begin); });
}

double Timeline::take_seconds(TimedPoint& point) {
  const std::optional<double> seconds = streams_.seconds_between(origin_, point);
  if (!seconds) throw std::logic_error("Timeline: the device has not come to a point that it had come to before");
  streams_.release(std::exchange(point, {}));
  return *seconds;
}

std::vector<Timeline::Entry> Timeline::stop_profile() {
  if (!std::exchange(is_profiled_, false)) return {};
  do {
    const StreamId streams[] = {streams_.current_stream(), streams_.offload_stream(), streams_.reload_stream()};
    for (const StreamId stream : streams) {
      const BlockingSection blocking;
      streams_.synchronize(streams_.record(stream));
    }
  } while (!read_profile());
  std::vector<Entry> seen;
  auto closed = closes_.begin();
  for (uint64_t number = profile_begin_; number <= entry_count(); ++number) {
    for (; closed != closes_.end() && closed->entry_count == number; ++closed) {
      seen.push_back(closed->entry);
      seen.back().begin_s = seen.back().end_s = take_seconds(closed->entry.begin);
    }
    if (number < entry_count()) seen.push_back(entry(number));
  }
  closes_.clear();
  const double begin_s = take_seconds(profile_origin_);
  for (Entry& entry : seen) {
    entry.begin_s -= begin_s;
    entry.end_s -= begin_s;
  }
  stop();
  return seen;
}

void Timeline::forget_unread() {
  for (uint64_t number = read_count_; number < entry_count(); ++number) {
    streams_.release(entry(number).begin);
    streams_.release(entry(number).end);
  }
}

// Those that were not read yet are kept: their points are still to be released.
void Timeline::forget_before(uint64_t number) {
  if (is_profiled_) number = std::min(number, profile_begin_);
  for (number = std::min(number, read_count_); first_entry_ < number; ++first_entry_) entries_.pop_front();
}

void Timeline::add(Entry entry) {
  if (!is_on() || !origin_.is_set() || !entry.begin.is_set()) {
    streams_.release(entry.begin);
    return streams_.release(entry.end);
  }
  if (is_profiled_) entry.device_bytes = memory_.allocated_bytes();
  entries_.push_back(entry);
}

uint64_t Timeline::read() {
  for (; read_count_ < entry_count(); ++read_count_) {
    Entry& entry = entries_[read_count_ - first_entry_];
    const auto begin_s = streams_.seconds_between(origin_, entry.begin);
    if (!begin_s) break;
    const auto end_s = entry.end.is_set() ? streams_.seconds_between(origin_, entry.end) : begin_s;
    if (!end_s) break;
    entry.begin_s = *begin_s;
    entry.end_s = *end_s;
    streams_.release(entry.begin);
    streams_.release(entry.end);
  }
  return read_count_;
}

}  // namespace torchoffload
