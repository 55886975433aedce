#include "testing/sim_clock.h"

#include <algorithm>

namespace torchoffload {

uint64_t VectorClock::advance(uint32_t index) {
  if (index >= steps_.size()) steps_.resize(index + 1, 0);
  return ++steps_[index];
}

void VectorClock::join(const VectorClock& other) {
  if (other.steps_.size() > steps_.size()) steps_.resize(other.steps_.size(), 0);
  for (size_t index = 0; index < other.steps_.size(); ++index) {
    steps_[index] = std::max(steps_[index], other.steps_[index]);
  }
}

std::string access_name(AccessKind kind, MemoryOwner owner) {
  const std::string memory = owner == MemoryOwner::Source ? "source" : owner == MemoryOwner::Buffer ? "buffer" : "slot";
  switch (kind) {
    case AccessKind::MemoryAllocated:
      return memory + " memory is allocated";
    case AccessKind::OperatorWrites:
      return "operator writes source";
    case AccessKind::Fill:
      return "something fills " + memory;
    case AccessKind::CopyOutReads:
      return "copy out reads " + memory;
    case AccessKind::CopyOutWrites:
      return "copy out writes slot";
    case AccessKind::CopyInReads:
      return "copy in reads slot";
    case AccessKind::CopyInWrites:
      return "copy in writes buffer";
    case AccessKind::UnpackReads:
      return "unpack reads " + memory;
    case AccessKind::SpillReads:
      return "a disk's thread reads slot";
    case AccessKind::FetchWrites:
      return "a disk's thread writes slot";
    case AccessKind::MemoryFreed:
      return memory + " memory is freed";
  }
  return {};
}

namespace {

bool is_read(AccessKind kind) {
  return kind == AccessKind::CopyOutReads || kind == AccessKind::CopyInReads || kind == AccessKind::UnpackReads ||
         kind == AccessKind::SpillReads;
}

// Does it read the results of operators, for the sake of a record?
bool reads_source(AccessKind kind) { return kind == AccessKind::CopyOutReads; }

bool happened_before(const Access& access, const VectorClock& clock) { return access.step <= clock.at(access.stream); }

// Must `earlier` be ordered before `later`, each for itself? See Note [Operator writes] for the exceptions.
bool conflicts(AccessKind earlier, AccessKind later) {
  if (is_read(earlier) && is_read(later)) return false;
  const bool may_be_same = earlier == AccessKind::OperatorWrites || earlier == AccessKind::Fill;
  if (later == AccessKind::OperatorWrites) return !is_read(earlier) && !may_be_same;
  if (earlier == AccessKind::OperatorWrites) return later != AccessKind::UnpackReads && !reads_source(later);
  return true;
}

// A copy out follows one of the operators that packed its source. Returns the last one if it follows none.
const Access* unfollowed_operator(const std::vector<Access>& accesses, const VectorClock& clock) {
  const Access* last = nullptr;
  for (const Access& access : accesses) {
    if (access.kind != AccessKind::OperatorWrites) continue;
    if (happened_before(access, clock)) return nullptr;
    last = &access;
  }
  return last;
}

const Access* find_racing(const std::vector<Access>& accesses, const Access& later, const VectorClock& clock) {
  if (reads_source(later.kind)) {
    if (const Access* racing = unfollowed_operator(accesses, clock)) return racing;
  }
  for (const Access& earlier : accesses) {
    if (conflicts(earlier.kind, later.kind) && !happened_before(earlier, clock)) return &earlier;
  }
  return nullptr;
}

// An access that is ordered after `later` is ordered after `earlier` too, and no rule asks for `earlier` itself.
bool is_superseded(const Access& earlier, const Access& later, const VectorClock& clock) {
  if (!happened_before(earlier, clock)) return false;
  const bool same_stream = earlier.kind == later.kind && earlier.stream == later.stream;
  if (is_read(later.kind)) return same_stream;
  if (later.kind == AccessKind::OperatorWrites) return same_stream && earlier.thread == later.thread;
  return true;
}

}  // namespace

void AccessMap::split_at(uint64_t address) {
  auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return;
  auto segment = std::prev(after);
  if (segment->first == address || segment->second.end <= address) return;
  Segment tail = segment->second;
  segment->second.end = address;
  segments_.emplace_hint(after, address, std::move(tail));
}

void AccessMap::fill_gaps(const Span& span) {
  uint64_t address = span.begin;
  for (auto segment = segments_.lower_bound(span.begin); address < span.end;) {
    if (segment == segments_.end() || segment->first >= span.end) {
      segments_.emplace_hint(segment, address, Segment{span.end, {}});
      return;
    }
    if (segment->first > address) segments_.emplace_hint(segment, address, Segment{segment->first, {}});
    address = segment->second.end;
    ++segment;
  }
}

std::optional<Race> AccessMap::add(const Span& span, const Access& access, const VectorClock& clock) {
  if (span.begin >= span.end) return std::nullopt;
  split_at(span.begin);
  split_at(span.end);
  fill_gaps(span);
  std::optional<Race> race;
  bool stands_alone = true;
  const auto first = segments_.lower_bound(span.begin);
  for (auto segment = first; segment != segments_.end() && segment->first < span.end; ++segment) {
    std::vector<Access>& accesses = segment->second.accesses;
    const Access* racing = race ? nullptr : find_racing(accesses, access, clock);
    if (racing) race = Race{*racing, access};
    std::erase_if(accesses, [&](const Access& earlier) { return is_superseded(earlier, access, clock); });
    stands_alone = stands_alone && accesses.empty();
    accesses.push_back(access);
  }
  if (stands_alone) {  // segments that an earlier owner of the bytes had cut become one again
    first->second.end = span.end;
    segments_.erase(std::next(first), segments_.lower_bound(span.end));
  }
  return race;
}

std::optional<Access> AccessMap::find_open_copy(const Span& span, const VectorClock& clock) const {
  auto segment = segments_.upper_bound(span.begin);
  if (segment != segments_.begin()) --segment;
  for (; segment != segments_.end() && segment->first < span.end; ++segment) {
    if (segment->second.end <= span.begin) continue;
    for (const Access& access : segment->second.accesses) {
      if (access.kind == AccessKind::CopyInWrites && !happened_before(access, clock)) return access;
    }
  }
  return std::nullopt;
}

std::optional<Access> AccessMap::find_unordered(const Span& span, const VectorClock& clock) const {
  auto segment = segments_.upper_bound(span.begin);
  if (segment != segments_.begin()) --segment;
  for (; segment != segments_.end() && segment->first < span.end; ++segment) {
    if (segment->second.end <= span.begin) continue;
    for (const Access& access : segment->second.accesses) {
      if (!happened_before(access, clock)) return access;
    }
  }
  return std::nullopt;
}

bool AccessMap::written_before(const Span& span, const VectorClock& clock) const {
  uint64_t address = span.begin;
  auto segment = segments_.upper_bound(address);
  if (segment != segments_.begin()) --segment;
  for (; address < span.end; ++segment) {
    if (segment == segments_.end() || segment->first > address) return false;
    if (segment->second.end <= address) continue;
    const auto& accesses = segment->second.accesses;
    const bool written = std::any_of(accesses.begin(), accesses.end(), [&](const Access& access) {
      return access.kind == AccessKind::OperatorWrites && happened_before(access, clock);
    });
    if (!written) return false;
    address = segment->second.end;
  }
  return true;
}

void AccessMap::forget(const Span& span) {
  split_at(span.begin);
  split_at(span.end);
  segments_.erase(segments_.lower_bound(span.begin), segments_.lower_bound(span.end));
}

uint64_t AccessMap::access_count() const {
  uint64_t count = 0;
  for (const auto& [begin, segment] : segments_) count += segment.accesses.size();
  return count;
}

}  // namespace torchoffload
