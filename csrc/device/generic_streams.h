// generic_streams.h: the streams of a device type that PyTorch knows through a DeviceGuardImpl, by an id, and the
// events of their points.
// Ownership:     streams, events and table live for the process.
// Thread safety: every method, any thread. No mutex that another stream's users need is held over a call that may
//                block.
// Stream order:  see Note [Events in use].
// Shutdown:      nothing is destroyed; see Note [No CUDA after main].
// Not handled:   streams that their owner destroys: PyTorch's interface does not say which streams these are.
//
// Note [Events in use]
// A stream's points are recorded into a ring of events, as in Note [Event ring] of cuda_backend.h: a wait for a point
// older than the ring is a wait for the oldest event in it, which stands for a later point of the same stream. The ring
// has room for kFirstEvents events at first, and doubles up to kEventsPerStream as the stream's points fill it: a
// program may use a new stream in each step, on which there are few points. Some guards replace an event's object each
// time that it is recorded, so no event is recorded while another thread waits for it: that event leaves the ring, and
// another takes its place.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "system/mutex.h"

namespace torchoffload {

class GenericStream {
 public:
  explicit GenericStream(c10::Stream stream) : stream_(stream) {}

  c10::Stream torch_stream() const { return stream_; }

  uint64_t record() EXCLUDES(in_order_, mutex_);

  // Calls `use` with an event that is reached no earlier than the point. Not called if the point needs no wait.
  template <typename Use>
  void with_event_of(uint64_t serial, Use use) EXCLUDES(mutex_) {
    if (serial == 0) return;
    const InUse in_use(*this, serial);
    if (in_use.entry != nullptr) use(static_cast<const c10::Event&>(in_use.entry->event));
  }

 private:
  static constexpr uint64_t kFirstEvents = 16;
  static constexpr uint64_t kEventsPerStream = 1024;

  struct Entry {
    explicit Entry(c10::DeviceType type) : event(type) {}
    c10::Event event;
    uint32_t user_count = 0;  // under the stream's mutex
    bool is_in_ring = false;  // likewise
  };

  struct InUse {
    InUse(GenericStream& of_stream, uint64_t serial) : stream(of_stream), entry(stream.begin_use(serial)) {}
    ~InUse() { stream.end_use(entry); }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;
    GenericStream& stream;
    Entry* const entry;
  };

  Entry* begin_use(uint64_t serial) EXCLUDES(mutex_);
  void end_use(Entry* entry) EXCLUDES(mutex_);
  // The event for the next point, which is in nobody's hands but the caller's.
  Entry* take_event(uint64_t serial) EXCLUDES(mutex_);
  void double_ring() REQUIRES(mutex_);

  const c10::Stream stream_;
  Mutex in_order_;  // one point at a time; held while the stream's queue is full
  Mutex mutex_;     // taken under in_order_, and never held while a call of the guard may block
  std::vector<Entry*> ring_ GUARDED_BY(mutex_) = std::vector<Entry*>(kFirstEvents, nullptr);
  std::vector<Entry*> spare_ GUARDED_BY(mutex_);
  std::deque<Entry> entries_ GUARDED_BY(mutex_);
  uint64_t serial_ GUARDED_BY(mutex_) = 0;
};

// All known streams of the process, by id. Leaked on purpose.
class GenericStreams {
 public:
  static GenericStreams& instance();

  GenericStream& at(StreamId id) EXCLUDES(mutex_);    // throws for an id that is none of these streams'
  GenericStream* find(StreamId id) EXCLUDES(mutex_);  // null for such an id
  StreamId id_of(c10::Stream stream) EXCLUDES(mutex_);
  // Another name for a stream that is ours, even if the program's streams come from the same pool.
  StreamId add(c10::Stream stream) EXCLUDES(mutex_);

 private:
  StreamId add_locked(c10::Stream stream) REQUIRES(mutex_);

  Mutex mutex_;
  std::map<StreamId, std::unique_ptr<GenericStream>> streams_ GUARDED_BY(mutex_);
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, c10::StreamId>, StreamId> ids_ GUARDED_BY(mutex_);
};

// Events with times, by number from 1. Those that are released are used again.
class GenericTimedEvents {
 public:
  explicit GenericTimedEvents(c10::DeviceType type) : type_(type) {}

  TimedPoint record(c10::Stream stream) EXCLUDES(mutex_);
  std::optional<double> seconds_between(TimedPoint from, TimedPoint to) EXCLUDES(mutex_);
  void release(TimedPoint point) EXCLUDES(mutex_);

 private:
  c10::Event& event(TimedPoint point) EXCLUDES(mutex_);

  const c10::DeviceType type_;
  Mutex mutex_;  // never held while a call may block
  std::deque<c10::Event> events_ GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
};

}  // namespace torchoffload
