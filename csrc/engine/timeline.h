// Timeline: the times of copies, waits and asks on the device, for the Learner and for profile().
// Ownership:     its entries, and the timed points of those that were not read yet. One for each engine.
// Thread safety: needs the GIL. A call that records a timed point may block, and releases the GIL for that time.
// Stream order:  adds points to streams, and no waits.
// Shutdown:      part of its engine; see Note [No CUDA after main].
// Cost:          one test of a bool while it is off.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "device/device_memory.h"
#include "device/streams.h"
#include "system/gil.h"

namespace torchoffload {

enum class EntryKind : uint8_t {
  Ready,       // a moment: the copy of a record may start, or a kept record was packed
  Needed,      // a moment: a backward asks for a record for the first time
  CopyOut,     // a span on offload_stream
  CopyIn,      // a span on reload_stream
  WindowWait,  // a span in which the compute_stream waits because the offload window is full
  ReloadWait,  // a span in which the compute_stream waits for a reload
  DropWait,    // a span in which the compute_stream waits for the copy of memory that is dropped (R9)
  Closed,      // a moment: a tape closed. Noted for profile() alone, and names no record
};
const char* to_string(EntryKind kind);

class Timeline {
 public:
  struct Entry {
    EntryKind kind = EntryKind::Ready;
    bool is_kept = false;
    uint64_t tape = 0;          // the tape's number, in the order of opening
    uint32_t record = 0;        // the record's number in the tape
    uint64_t nbytes = 0;        // of the record
    uint64_t out_bytes = 0;     // in the offload window, once this was enqueued
    uint64_t in_bytes = 0;      // in the reload window
    uint64_t device_bytes = 0;  // allocated on the device, as the host sees it; 0 if profile() is off
    TimedPoint begin, end;
    // Known once read() has come to the entry: seconds since the origin, or since start_profile() in the entries that
    // stop_profile() returns.
    double begin_s = 0;
    double end_s = 0;
  };

  Timeline(Streams& streams, DeviceMemory& memory) : streams_(streams), memory_(memory) {}
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // One user more, or one less, wants entries: a tape that is timed, or profile(). The timeline is on while it has a
  // user. The first time that is taken after it was turned on is the origin. The last stop() forgets all entries.
  void start();
  void stop();
  bool is_on() const { return wanted_ > 0; }

  // Turns profile() on: until it is off, the allocated memory is noted with each entry, and no entry is forgotten. Does
  // nothing if the device tells no time. May block.
  void start_profile() REQUIRES(gil);
  // Turns profile() off. Returns the entries since start_profile(), in the order in which the host made them. Blocks
  // the host until the device has reached all of them.
  std::vector<Entry> stop_profile() REQUIRES(gil);
  bool is_profiled() const { return is_profiled_; }

  // Notes for profile() that the tape of this number closed. Does nothing while profile() is off. May block.
  void note_close(uint64_t tape) REQUIRES(gil);

  // The present place of a stream. May block.
  TimedPoint now(StreamId stream) REQUIRES(gil);

  // Sets the origin if there is none. Call it before timed points are recorded without now(), as copies do. May block.
  void set_origin() REQUIRES(gil);

  // Adds an entry and takes over its points; a moment has no `end`. An entry without a begin is dropped, and so is one
  // that comes when the timeline is off.
  void add(Entry entry);

  // Entries are numbered from 0, and kept until the last stop() or forget_before().
  uint64_t entry_count() const { return first_entry_ + entries_.size(); }
  const Entry& entry(uint64_t number) const { return entries_.at(number - first_entry_); }

  uint64_t held_count() const { return entries_.size(); }

  // Nobody but profile() asks for the entries before this number any more.
  void forget_before(uint64_t number);

  // Reads the times of entries, in order, as far as the device has come. Returns how many were read since the timeline
  // was turned on. Never blocks.
  uint64_t read();

 private:
  struct Close {
    uint64_t entry_count = 0;  // how many entries there were when the tape closed
    Entry entry;
  };

  // Gives the points of entries that were not read back to the backend.
  void forget_unread();
  // Reads on. Has the device reached all entries that profile() noted?
  bool read_profile();
  // The seconds from the origin to a point that was reached. The point goes back to the backend.
  double take_seconds(TimedPoint& point);
  // Records a timed point, without the GIL if that may block.
  TimedPoint record(StreamId stream) REQUIRES(gil);

  Streams& streams_;
  DeviceMemory& memory_;  // asked how much of it is in use
  uint32_t wanted_ = 0;
  bool is_profiled_ = false;
  uint64_t profile_begin_ = 0;
  TimedPoint profile_origin_;
  std::vector<Close> closes_;  // apart from the entries, which TapeTimes reads
  TimedPoint origin_;
  std::deque<Entry> entries_;
  uint64_t first_entry_ = 0;  // the number of the first one of them
  uint64_t read_count_ = 0;   // of all, those that were forgotten included
};

// Enters a span of time on a stream: its begin is recorded by the constructor, its end by the destructor. Both may
// block. Does nothing while the timeline is off.
class TimedSpan {
 public:
  TimedSpan(Timeline& timeline, StreamId stream, Timeline::Entry entry)
      : timeline_(timeline), stream_(stream), entry_(entry) {
    if (timeline_.is_on()) entry_.begin = timeline_.now(stream_);
  }
  ~TimedSpan() {
    if (!entry_.begin.is_set()) return;
    try {
      entry_.end = timeline_.now(stream_);
      timeline_.add(entry_);
    } catch (...) {  // a failing device raises again at the next call that can report it
    }
  }
  TimedSpan(const TimedSpan&) = delete;
  TimedSpan& operator=(const TimedSpan&) = delete;

 private:
  Timeline& timeline_;
  const StreamId stream_;
  Timeline::Entry entry_;
};

}  // namespace torchoffload
