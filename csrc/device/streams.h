// Streams: the orders in which a device does its enqueued work, and the points in them. A part of a Backend.
// Ownership:     streams and points are numbers. A timed point is its device's own, until release().
// Thread safety: every method, any thread. Calls that may block are made without the GIL; see may_block().
// Failures:      a call that throws has enqueued nothing.
// Stream order:  a device orders nothing on its own. Every cross-stream wait is made by engine/stream_order.cpp.
// Shutdown:      lives for the process; see Note [No CUDA after main].
//
// Operators run on the stream that current_stream() names. Each device has two more streams, ours: offload_stream() and
// reload_stream(). If the host itself computes (CPU with disk), current_stream() is the host: a wait there blocks the
// calling thread.
#pragma once

#include <cstdint>
#include <optional>

#include "core/types.h"
#include "system/gil.h"

namespace torchoffload {

enum class PointStatus : uint8_t { Pending, Reached };

// How it becomes known that work on a stream has finished with its memory.
enum class Completion : uint8_t {
  ByStreamOrder,  // another stream that was told to wait is ordered behind it: its memory may be handed on there (R9)
  ByPolling,      // I/O: no stream order protects the memory of a copy, so it is held until status() says Reached
};

// A point of a stream's order whose time is measured.
struct TimedPoint {
  uint32_t id = 0;
  bool is_set() const { return id != 0; }
};

class Streams {
 public:
  virtual ~Streams() = default;

  virtual StreamId current_stream() = 0;
  virtual StreamId offload_stream() = 0;
  virtual StreamId reload_stream() = 0;

  // The same answer each time. kNoStream: ByPolling if that is so of any of its streams.
  virtual Completion completion(StreamId stream) const = 0;

  // Have all copies ended when the calls that make them return? The same answer each time. Nothing is on its way then,
  // so windows hold memory for nothing.
  virtual bool copies_at_once() const { return false; }

  // False for a stream that its owner may destroy, after which another may have its id. While it is the calling
  // thread's current stream it certainly exists; see Note [Streams that may be destroyed].
  virtual bool is_lasting(StreamId /*stream*/) { return true; }

  // True if record(), record_timed(), wait(), or a copy or DeviceMemory::allocate() on this stream may block the host:
  // a stream's queue holds a limited number of commands, and if the stream is the host itself, the host waits and
  // copies. Such calls are made without the GIL, and without any lock that a holder of the GIL may want.
  virtual bool may_block(StreamId stream) const = 0;

  // Is a CUDA graph being captured on the current stream? Nothing is enqueued, grown or waited for then.
  virtual bool is_capturing() { return false; }

  // Is one being captured on this stream? A point recorded there would draw each stream that waits for it into the
  // capture.
  virtual bool is_capturing_on(StreamId /*stream*/) { return false; }

  // ---- points ----

  // The point behind all work enqueued on `stream` up to now.
  virtual Point record(StreamId stream) = 0;

  // Work enqueued on `waiter` after this call runs after `point`.
  virtual void wait(StreamId waiter, Point point) = 0;

  // Blocks the host until `point` is reached.
  virtual void synchronize(Point point) EXCLUDES(gil) = 0;

  // Has `point` been reached? Only called if its stream completes ByPolling; a step on a GPU never asks.
  virtual PointStatus status(Point point) = 0;

  // ---- times, which are taken only in a timed step ----

  // If this is false, no point is set and no time known.
  virtual bool tells_time() const { return false; }
  virtual TimedPoint record_timed(StreamId /*stream*/) { return {}; }
  // From one to the other; nullopt while either was not reached yet.
  virtual std::optional<double> seconds_between(TimedPoint /*from*/, TimedPoint /*to*/) { return std::nullopt; }
  virtual void release(TimedPoint) {}  // an unset one: nothing
};

// The next stream id, from the one counter of the process. Thread-safe.
StreamId next_stream_id();

}  // namespace torchoffload
