// Timeline: when what happened on the device, for the Learner and for profile(). Off, it costs a test of a bool.
// Ownership:     its entries, and the timed points of those that were not read yet. One for each engine.
// Thread safety: needs the GIL. What takes a time may block, and lets other threads in.
// Stream order:  adds points to streams, and no waits.
// Shutdown:      part of its engine; see Note [No CUDA after main].
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "device/device_memory.h"
#include "device/streams.h"

namespace torchoffload {

enum class EntryKind : uint8_t {
  Ready,       // the copy of a record may start, or a kept one was packed: a moment
  Needed,      // a record was asked for by a backward for the first time: a moment
  CopyOut,     // a span on offload_stream
  CopyIn,      // a span on reload_stream
  WindowWait,  // a span in which the compute_stream waits for a full window
  ReloadWait,  // a span in which it waits for a record on its way back
  Closed,      // a tape closed, and no record is meant: a moment, noted for profile() alone
};
const char* to_string(EntryKind kind);

class Timeline {
 public:
  struct Entry {
    EntryKind kind = EntryKind::Ready;
    bool is_kept = false;
    uint64_t tape = 0;          // number in the order of opening
    uint32_t record = 0;        // its number in the tape
    uint64_t nbytes = 0;        // of the record
    uint64_t out_bytes = 0;     // in the offload window, once this was enqueued
    uint64_t in_bytes = 0;      // in the reload window
    uint64_t device_bytes = 0;  // allocated on the device, as the host sees it; 0 where nobody asked
    TimedPoint begin, end;
    double begin_s =
        0;  // since the origin, in what stop_profile() returns since start_profile(); once read() got there
    double end_s = 0;
  };

  Timeline(Streams& streams, DeviceMemory& memory) : streams_(streams), memory_(memory) {}

  // Of those who want entries: a tape that is timed, profile(). Counted. The first time that is taken after the first
  // start() is the origin.
  void start();
  void stop();  // the last one forgets all entries
  bool is_on() const { return wanted_ > 0; }

  // profile() is on: memory is noted with each entry, and nothing is forgotten until it is off. Does nothing where the
  // device tells no time.
  void start_profile();
  // What was seen since start_profile(), in the order of the host. Blocks the host until the device has come to all of
  // it.
  std::vector<Entry> stop_profile();
  bool is_profiled() const { return is_profiled_; }

  // For profile(): the tape of this number closed. Does nothing where profile() is off.
  void note_close(uint64_t tape);

  TimedPoint now(StreamId stream);

  // Before times are taken by others than now(), without the GIL.
  void set_origin();

  // Takes both points over; `end` unset for a moment. Drops what has no begin, and what nobody wants by now.
  void add(Entry entry);

  // Entries are numbered from 0 and kept until the last stop().
  uint64_t entry_count() const { return entries_.size(); }
  const Entry& entry(uint64_t number) const { return entries_.at(number); }

  // Reads the times of entries, in order, as far as the device has come. Returns the number of those read. Never
  // blocks.
  uint64_t read();

 private:
  struct Close {
    uint64_t entry_count = 0;  // when it came
    Entry entry;
  };

  void forget_unread();
  bool read_profile();
  double take_seconds(TimedPoint& point);
  TimedPoint record(StreamId stream);

  Streams& streams_;
  DeviceMemory& memory_;  // asked how much of it is in use
  uint32_t wanted_ = 0;
  bool is_profiled_ = false;
  uint64_t profile_begin_ = 0;
  TimedPoint profile_origin_;
  std::vector<Close> closes_;  // apart from the entries: the Learner knows none
  TimedPoint origin_;
  std::deque<Entry> entries_;
  uint64_t read_count_ = 0;
};

// A span: its begin is taken when it is made, its end when it ends. Does nothing while the timeline is off.
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
    } catch (...) {  // a failing device says so at the next call that matters
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
