#include "autograd/timeline.h"

#include <algorithm>
#include <utility>

#include "autograd/operation.h"

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
  }
  return "?";
}

void Timeline::start() {
  if (wanted_++ > 0) return;
  origin_ = backend_.record_timed(backend_.current_stream());
}

void Timeline::stop() {
  if (--wanted_ > 0) return;
  forget_unread();
  entries_.clear();
  read_count_ = 0;
  backend_.give_back(origin_);
  origin_ = {};
}

void Timeline::start_profile() {
  if (is_profiled_ || !backend_.tells_time()) return;
  is_profiled_ = true;
  start();
  profile_begin_ = entries_.size();
}

std::vector<Timeline::Entry> Timeline::stop_profile() {
  if (!std::exchange(is_profiled_, false)) return {};
  while (read() < entries_.size()) {
    const StreamId streams[] = {backend_.current_stream(), backend_.offload_stream(), backend_.reload_stream()};
    for (const StreamId stream : streams) {
      const Point end = backend_.record(stream);
      const BlockingSection blocking;
      backend_.synchronize(end);
    }
  }
  std::vector<Entry> seen(entries_.begin() + static_cast<ptrdiff_t>(profile_begin_), entries_.end());
  stop();
  return seen;
}

void Timeline::forget_unread() {
  for (uint64_t number = read_count_; number < entries_.size(); ++number) {
    backend_.give_back(entries_[number].begin);
    backend_.give_back(entries_[number].end);
  }
}

void Timeline::add(Entry entry) {
  if (is_profiled_) entry.device_bytes = backend_.allocated_bytes();
  entries_.push_back(entry);
}

uint64_t Timeline::read() {
  for (; read_count_ < entries_.size(); ++read_count_) {
    Entry& entry = entries_[read_count_];
    const auto begin_s = backend_.seconds_between(origin_, entry.begin);
    if (!begin_s) break;
    const auto end_s = entry.end.is_set() ? backend_.seconds_between(origin_, entry.end) : begin_s;
    if (!end_s) break;
    entry.begin_s = *begin_s;
    entry.end_s = *end_s;
    backend_.give_back(entry.begin);
    backend_.give_back(entry.end);
  }
  return read_count_;
}

}  // namespace torchoffload
