// CopyTime: the end of a copy that offload.cpp or reload.cpp enqueues, and its duration if that is wanted.
// Ownership:     a CopyTime holds two timed points until enter() hands them on, or its user gives them back.
// Thread safety: enter() needs the GIL; time_if() and end_of_copy() may block and are called without it.
#pragma once

#include <exception>

#include "device/streams.h"
#include "engine/timeline.h"

namespace torchoffload {

// When a copy begins and ends, on the stream that makes it.
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

// The point at the end of a copy that was enqueued just now. Without this point it is not known when the copy's memory
// may be used again, so a failed recording is tried a second time.
inline Point end_of_copy(Streams& streams, StreamId stream) {
  try {
    return streams.record(stream);
  } catch (const std::exception&) {
    return streams.record(stream);
  }
}

}  // namespace torchoffload
