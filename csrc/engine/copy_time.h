// What offload.cpp and reload.cpp both need of a copy that they enqueue: its end, and its time where that is wanted.
#pragma once

#include <exception>

#include "device/streams.h"
#include "engine/timeline.h"

namespace torchoffload {

// The time of a copy, on the stream that makes it.
struct CopyTime {
  bool is_wanted = false;
  TimedPoint begin, end;

  void enter(Timeline& timeline, Timeline::Entry entry) const {
    entry.begin = begin;
    entry.end = end;
    timeline.add(entry);
  }
};

inline TimedPoint time_if(bool is_wanted, Streams& streams, StreamId stream) {
  return is_wanted ? streams.record_timed(stream) : TimedPoint{};
}

// Of a copy that was enqueued just now. Nobody knows without it when the copy's memory may be used again, so a failure
// is met by a second try.
inline Point end_of_copy(Streams& streams, StreamId stream) {
  try {
    return streams.record(stream);
  } catch (const std::exception&) {
    return streams.record(stream);
  }
}

}  // namespace torchoffload
