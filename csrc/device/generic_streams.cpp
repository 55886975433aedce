#include "device/generic_streams.h"

#include <algorithm>
#include <array>

namespace torchoffload {

GenericStream::Entry* GenericStream::take_event(uint64_t serial) {
  const MutexLock lock(mutex_);
  if (ring_.size() < kEventsPerStream && ring_[serial % ring_.size()] != nullptr) double_ring();
  Entry*& place = ring_[serial % ring_.size()];
  if (place != nullptr) {
    place->is_in_ring = false;
    if (place->user_count == 0) spare_.push_back(place);
    place = nullptr;
  }
  if (spare_.empty()) spare_.push_back(&entries_.emplace_back(stream_.device_type()));
  Entry* const taken = spare_.back();
  spare_.pop_back();
  return taken;
}

void GenericStream::double_ring() {
  std::vector<Entry*> larger(2 * ring_.size(), nullptr);
  const uint64_t first = serial_ < ring_.size() ? 1 : serial_ - ring_.size() + 1;
  for (uint64_t serial = first; serial <= serial_; ++serial) {
    larger[serial % larger.size()] = ring_[serial % ring_.size()];
  }
  ring_ = std::move(larger);
}

uint64_t GenericStream::record() {
  const MutexLock in_order(in_order_);
  uint64_t serial = 0;
  {
    const MutexLock lock(mutex_);
    serial = serial_ + 1;
  }
  Entry* const taken = take_event(serial);
  try {
    taken->event.record(stream_);
  } catch (...) {
    const MutexLock lock(mutex_);
    spare_.push_back(taken);
    throw;
  }
  const MutexLock lock(mutex_);
  taken->is_in_ring = true;
  ring_[serial % ring_.size()] = taken;
  serial_ = serial;
  return serial;
}

// The oldest event is left out: it may be on its way out of the ring.
GenericStream::Entry* GenericStream::begin_use(uint64_t serial) {
  const MutexLock lock(mutex_);
  const uint64_t oldest = serial_ < ring_.size() ? 1 : serial_ - ring_.size() + 2;
  Entry* const entry = ring_[std::max(serial, oldest) % ring_.size()];
  if (entry != nullptr) ++entry->user_count;
  return entry;
}

void GenericStream::end_use(Entry* entry) {
  if (entry == nullptr) return;
  const MutexLock lock(mutex_);
  --entry->user_count;
  if (entry->user_count == 0 && !entry->is_in_ring) spare_.push_back(entry);
}

GenericStreams& GenericStreams::instance() {
  static auto* const leaked = new GenericStreams;
  return *leaked;
}

// Called many times for each record, so each thread caches the streams that it found, as StreamTable does.
GenericStream& GenericStreams::at(StreamId id) {
  struct Known {
    StreamId id = kNoStream;
    GenericStream* stream = nullptr;
  };
  thread_local std::array<Known, 8> latest;
  Known& known = latest[static_cast<size_t>(id) % latest.size()];
  if (known.id != id || known.stream == nullptr) {
    const MutexLock lock(mutex_);
    known = {id, streams_.at(id).get()};
  }
  return *known.stream;
}

GenericStream* GenericStreams::find(StreamId id) {
  const MutexLock lock(mutex_);
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : found->second.get();
}

StreamId GenericStreams::id_of(c10::Stream stream) {
  const MutexLock lock(mutex_);
  const auto [known, is_new] = ids_.try_emplace({stream.device_type(), stream.device_index(), stream.id()}, kNoStream);
  if (is_new) known->second = add_locked(stream);
  return known->second;
}

StreamId GenericStreams::add(c10::Stream stream) {
  const MutexLock lock(mutex_);
  return add_locked(stream);
}

StreamId GenericStreams::add_locked(c10::Stream stream) {
  const StreamId id = next_stream_id();
  streams_.emplace(id, std::make_unique<GenericStream>(stream));
  return id;
}

TimedPoint GenericTimedEvents::record(c10::Stream stream) {
  uint32_t id = 0;
  {
    const MutexLock lock(mutex_);
    if (free_.empty()) {
      events_.emplace_back(type_, c10::EventFlag::BACKEND_DEFAULT);
      free_.push_back(static_cast<uint32_t>(events_.size()));
    }
    id = free_.back();
    free_.pop_back();
  }
  try {
    event({id}).record(stream);
  } catch (...) {
    release({id});
    throw;
  }
  return {id};
}

std::optional<double> GenericTimedEvents::seconds_between(TimedPoint from, TimedPoint to) {
  const c10::Event& first = event(from);
  const c10::Event& last = event(to);
  if (!first.query() || !last.query()) return std::nullopt;
  return first.elapsedTime(last) / 1000;  // which is in milliseconds
}

void GenericTimedEvents::release(TimedPoint point) {
  if (!point.is_set()) return;
  const MutexLock lock(mutex_);
  free_.push_back(point.id);
}

c10::Event& GenericTimedEvents::event(TimedPoint point) {
  const MutexLock lock(mutex_);
  return events_.at(point.id - 1);
}

}  // namespace torchoffload
