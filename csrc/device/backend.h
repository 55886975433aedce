// Backend: how bytes move between one kind of device and one tier. The seam between the engine and the world.
// Ownership:     the engine owns tensors and slots; a backend keeps no reference to either after a call, except an
//                I/O backend, which touches a copy's memory until the copy's point is reached.
// Thread safety: every method, any thread. What may block is called without the GIL; see may_block().
// Failures:      a call that throws has enqueued nothing.
// Stream order:  a backend does what it is told: it orders nothing on its own. Every cross-stream wait is made by
//                engine/stream_order.cpp.
// Shutdown:      backends live for the process; see Note [No CUDA after main].
//
// Streams of the device (where operators run) are named by current_stream(). Each device has two more, ours:
// offload_stream() and reload_stream(). Where the host itself computes (CPU with disk), current_stream() is the host: a
// wait there blocks the calling thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/types.h"
#include "device/memory.h"
#include "storage/slot_store.h"

namespace torchoffload {

enum class PointStatus : uint8_t { Pending, Reached };

// A place in a stream's order whose time is wanted. Its backend's own; give_back() ends it.
struct TimedPoint {
  uint32_t id = 0;
  bool is_set() const { return id != 0; }
};

// Where a storage's memory comes from.
struct MemoryOrigin {
  uint64_t allocation = 0;      // which of its allocator's allocations it is, from 1; 0: not known
  StreamId stream = kNoStream;  // that it was allocated on; kNoStream: not known
};

class Backend {
 public:
  virtual ~Backend() = default;

  // As PyTorch writes it: "cuda:0".
  virtual std::string device() const = 0;
  virtual StreamId current_stream() = 0;
  virtual StreamId offload_stream() = 0;
  virtual StreamId reload_stream() = 0;

  // The point at the end of what was enqueued on `stream` up to now.
  virtual Point record(StreamId stream) = 0;

  // What is enqueued on `waiter` after this call runs after `point`.
  virtual void wait(StreamId waiter, Point point) = 0;

  // Device memory whose address is `address_modulo` modulo kAlignmentBytes, allocated on current_stream() and
  // freed as that stream's allocations are. Throws c10::OutOfMemoryError (or std::bad_alloc's kin) when there is none.
  virtual Memory allocate(uint64_t nbytes, uint64_t address_modulo) = 0;

  // Enqueues a copy of `nbytes` on `stream`. source/target are device addresses.
  virtual void copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) = 0;
  virtual void copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) = 0;

  // Is this memory of the device's own allocator? Any other has an owner that is called at once when it is dropped, and
  // knows nothing of streams.
  virtual bool owns(MemoryRef /*memory*/) const { return true; }

  // Tells the allocator that `stream` used this memory, which, once freed, waits for what is enqueued there.
  // Free when `stream` is the one it was allocated on. Does nothing for memory that owns() denies.
  virtual void note_use(MemoryRef memory, StreamId stream) = 0;

  // Two answers with another allocation mean that the storage was given other memory in between, wherever it stands.
  // See docs/design.md, R2 and R10, for what each backend knows.
  virtual MemoryOrigin origin_of(MemoryRef) { return {}; }

  // Before the first record is made: must settle() be called, which waits for all that the device was given so far?
  // Without that origin_of() says nothing of older memory. settle() blocks: call it without the GIL.
  virtual bool must_settle() { return false; }
  virtual void settle() {}

  // Blocks the host until `point` is reached. Call it without the GIL.
  virtual void synchronize(Point point) = 0;

  // Has `point` been reached? Only meaningful, and only called, where completes_in_background(); a step on a GPU never
  // asks.
  virtual PointStatus status(Point point) = 0;

  // The reason why the copy that ended at `point` failed, or empty. Valid once the point was reached.
  virtual std::string failure(Point) { return {}; }

  // Nobody asks for the failure of this copy any more.
  virtual void forget(Point) {}

  // Times: taken in a step that is timed, and in no other. Where tells_time() is false, no point is set and no time
  // known.
  virtual bool tells_time() const { return false; }
  virtual TimedPoint record_timed(StreamId /*stream*/) { return {}; }
  // From one to the other; nullopt while either was not reached yet.
  virtual std::optional<double> seconds_between(TimedPoint /*from*/, TimedPoint /*to*/) { return std::nullopt; }
  virtual void give_back(TimedPoint) {}  // an unset one: nothing

  // Of the device's allocator, in use now; 0 where it does not tell.
  virtual uint64_t allocated_bytes() { return 0; }

  // True for I/O: the memory of a copy must be held until status() says that its point was reached, since no stream
  // order protects it. False where waiting on a stream is enough (R9).
  virtual bool completes_in_background() const = 0;

  // False for a stream that its owner may destroy, after which another may have its id. It is there for sure while it
  // is the calling thread's current one; see Note [Streams that may be destroyed].
  virtual bool is_lasting(StreamId /*stream*/) { return true; }

  // True if record(), record_timed(), wait(), allocate() or a copy on this stream may block the host: a stream takes so
  // many commands and no more until it has come to some of them, and the host itself, where it is the stream, waits and
  // copies. They are called without the GIL then, and no lock is held over them that a holder of the GIL may want.
  virtual bool may_block(StreamId stream) const = 0;

  // Is this memory of CUDA graphs that are replayed behind autograd's back? See Note [Memory of graph trees].
  virtual bool is_graph_memory(const void* /*address*/) { return false; }

  // Is a CUDA graph being captured on the current stream? Nothing is enqueued, grown or waited for then.
  virtual bool is_capturing() { return false; }

  // Is one being captured on this stream? A point recorded there would draw who waits for it into the capture.
  virtual bool is_capturing_on(StreamId /*stream*/) { return false; }

  // For the simulated device: the operator that was packing `nbytes` at `address` on `stream` may write it until
  // the calling thread's autograd sequence number is no longer `sequence_number`. A no-op elsewhere.
  virtual void saw_pack(const void* /*address*/, uint64_t /*nbytes*/, StreamId /*stream*/,
                        uint64_t /*sequence_number*/) {}

  // For the log of the tests: the store had to grow before this save's copy could be enqueued. A no-op elsewhere.
  virtual void saw_growth() {}

  // For the simulated device: the calling thread is inside no operator any more (a context's exit).
  virtual void saw_operators_end() {}

  // For the simulated device: a consumer on `stream` was handed the bytes at `address`. A no-op elsewhere.
  virtual void saw_unpack(const void* /*address*/, uint64_t /*nbytes*/, StreamId /*stream*/) {}
};

// The next stream id, from the one counter of the process. Thread-safe.
StreamId next_stream_id();

}  // namespace torchoffload
