// StreamOrder: the only place that makes a stream wait, and that drops memory which a copy may still touch.
// Ownership:     memory whose drop was deferred.
// Thread safety: needs the GIL, except a Batch while its calls are made. Calls that may block release the GIL for that
//                time, so the ledger must be read again after them.
// Failures:      a wait that throws was not made, and is not remembered. defer_free() never throws.
// Stream order:  each wait is named by its Rule. A wait that is known to have been made is not made again.
// Shutdown:      part of its engine; see Note [No CUDA after main].
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/mutant.h"
#include "core/types.h"
#include "device/memory.h"
#include "device/streams.h"
#include "engine/operation.h"
#include "system/gil.h"

namespace torchoffload {

// Every wait of one stream for another, with the number of its rule in docs/design.md. The test build can leave out
// each of them.
enum class Rule : uint8_t {
  // R2. offload_stream waits for the stream that was current at the pack: the operator that fills the source is on it.
  OffloadWaitsForCompute = static_cast<uint8_t>(Mutant::OffloadWaitsForCompute),
  // R2. offload_stream waits for the stream that the source's memory was allocated on: a custom Function may fill its
  // saved tensors on a stream of its own, which the program joins later.
  OffloadWaitsForAllocation = static_cast<uint8_t>(Mutant::OffloadWaitsForAllocation),
  // R5. offload_stream waits for the slot's former users: they read or write its bytes until then.
  OffloadWaitsForGuards = static_cast<uint8_t>(Mutant::OffloadWaitsForGuards),
  // R3. The source's stream waits for the copy out when the window is full: the allocator may give the source's memory
  // to later work on that stream.
  ComputeWaitsForOffload = static_cast<uint8_t>(Mutant::ComputeWaitsForOffload),
  // R6. reload_stream waits for the stream that allocated the buffer: its memory may be in use there until then.
  ReloadWaitsForCompute = static_cast<uint8_t>(Mutant::ReloadWaitsForCompute),
  // R6. reload_stream waits for the copy out: the slot's bytes are complete only then.
  ReloadWaitsForOffload = static_cast<uint8_t>(Mutant::ReloadWaitsForOffload),
  // R5. A reload on another stream than the last one waits for that one: only the latest reload guards the slot.
  ReloadWaitsForReload = static_cast<uint8_t>(Mutant::ReloadWaitsForReload),
  // R7. The consumer's stream waits for the copy in: the buffer's bytes are there only then.
  ConsumerWaitsForReload = static_cast<uint8_t>(Mutant::ConsumerWaitsForReload),
  // R7. A consumer on another stream than the first one waits as the first did.
  LaterConsumerWaitsForReload = static_cast<uint8_t>(Mutant::LaterConsumerWaitsForReload),
  // R7. A consumer that is given bytes which an earlier one still holds waits for their copy in, too.
  ConsumerWaitsForWeak = static_cast<uint8_t>(Mutant::ConsumerWaitsForWeak),
  // R9. The stream of a source that is dropped waits for the copy out: the allocator may give the memory to later work
  // on that stream.
  DroppedSourceWaitsForOffload = static_cast<uint8_t>(Mutant::DroppedSourceWaitsForOffload),
  // R9. The stream of a buffer that is dropped waits for the copy in, for the same reason.
  DroppedBufferWaitsForReload = static_cast<uint8_t>(Mutant::DroppedBufferWaitsForReload),
  // R17. The current stream waits for the copy out of a source that a compiled graph releases: the graph reuses the
  // memory on that stream by itself, and no allocator is asked.
  ReleasedSourceWaitsForOffload = static_cast<uint8_t>(Mutant::ReleasedSourceWaitsForOffload),
};

// Device memory with the point until which a copy in flight touches it, and the stream that must be told to wait for
// that point before the memory may be dropped (R9).
struct DeviceBytes {
  Memory memory;
  uint64_t base_bytes = 0;  // the offset of its first byte in the memory that was packed
  StreamId stream = kNoStream;
  Point busy_until;
  bool is_buffer = false;  // a reload buffer, which we allocated on `stream`
};

class StreamOrder {
  struct Made {
    StreamId waiter;
    StreamId producer;
    uint64_t serial;
  };

 public:
  explicit StreamOrder(Streams& streams)
      : streams_(streams), has_polled_(streams.completion(kNoStream) == Completion::ByPolling) {}

  // ---- streams ----

  // Does the copy that ends at this point complete in the background, as I/O does? Then no stream order protects its
  // memory, and the stream is asked whether the copy has ended.
  bool is_polled(Point point) const {
    return has_polled_ && streams_.completion(point.stream) == Completion::ByPolling;
  }

  // Is there any such stream?
  bool has_polled() const { return has_polled_; }

  // Is it known, without any wait, that this point was reached? Never of a point that is not polled.
  bool is_seen_reached(Point point) const { return is_polled(point) && is_reached(point); }

  // Does the stream exist for as long as the process?
  bool is_lasting(StreamId stream) const {
    return streams_.is_lasting(stream) || mutated(Mutant::StreamsMayBeDestroyed);
  }

  // May a call of ours name the stream? See Note [Streams that may be destroyed].
  bool can_be_used(StreamId stream) const { return stream == streams_.current_stream() || is_lasting(stream); }

  // ---- waits ----

  // Makes `waiter` wait for `point`, unless it is known to have waited for that point or a later one of the same
  // stream. May block.
  void wait(Rule rule, StreamId waiter, Point point) REQUIRES(gil);

  // Makes the host wait for `point`. Blocks.
  void synchronize(Point point) REQUIRES(gil);

  // A wait to be made.
  struct Wanted {
    Rule rule;
    StreamId waiter;
    Point point;
  };
  // The same wait, for a Batch that makes it among other calls, so that the GIL is released once for all of them:
  // wait() finds it made then. nullopt: no wait is needed, or it would block the host.
  std::optional<Wanted> wanted(Rule rule, StreamId waiter, Point point) const REQUIRES(gil);

  // Would wait() make a wait?
  bool must_wait(Rule rule, StreamId waiter, Point point) const REQUIRES(gil);

  // Makes waits without the GIL, between the calls that they order. remember() notes them afterwards, with the GIL.
  class Batch {
   public:
    explicit Batch(Streams& streams) : streams_(streams) {}
    void wait(Rule rule, StreamId waiter, Point point);
    // Makes the wait that wanted() returned, if it returned one.
    void make(const std::optional<Wanted>& wanted) {
      if (wanted) wait(wanted->rule, wanted->waiter, wanted->point);
    }

   private:
    friend class StreamOrder;
    std::span<const Made> made() const { return {made_.data(), made_count_}; }

    Streams& streams_;
    // The latest wait of each pair of streams. A wait that finds no room here is not noted, and so may be made once
    // more.
    std::array<Made, 8> made_;
    size_t made_count_ = 0;
  };
  Batch batch() const { return Batch(streams_); }
  void remember(const Batch& batch) REQUIRES(gil);

  // Makes `call`, which enqueues on `stream`. Releases the GIL for it if that may block, so the call may use nothing
  // that the GIL guards. The analysis follows no release that depends on a condition.
  template <typename Function>
  void without_gil(StreamId stream, Function call) REQUIRES(gil) NO_THREAD_SAFETY_ANALYSIS {
    std::optional<BlockingSection> blocking;
    if (streams_.may_block(stream)) blocking.emplace();
    call();
  }

  // ---- memory ----

  // Drops memory after its stream was told to wait for the copy that touches it (R9); `rule` names the wait. The memory
  // stays on a list, for free_deferred(), if the wait cannot be made now: the I/O is still in flight, a CUDA graph is
  // being captured, or the device fails. May block, unless the copy is polled.
  void defer_free(DeviceBytes bytes, Rule rule) noexcept REQUIRES(gil);

  // Would defer_free() make the stream of this memory wait? A wait of the host is not meant.
  bool stalls_when_dropped(const DeviceBytes& bytes, Rule rule) const REQUIRES(gil) {
    return bytes.memory && !is_polled(bytes.busy_until) && must_wait(rule, bytes.stream, bytes.busy_until) &&
           can_wait_to_drop(bytes) && !streams_.is_capturing() && !streams_.is_capturing_on(bytes.stream);
  }

  // Tries again to drop the memory on the list. May block, but not for polled copies.
  void free_deferred() REQUIRES(gil) {
    if (!deferred_.empty()) free_deferred_list();
  }

  bool has_deferred() const REQUIRES(gil) { return !deferred_.empty(); }

  // Waits on the host for all I/O on deferred memory, and drops that memory. Blocks if there is any.
  void finish_deferred() REQUIRES(gil);

 private:
  struct Deferred {
    DeviceBytes bytes;
    Rule rule;
  };

  // Does the mutant of this rule leave the wait out?
  static bool is_left_out(Rule rule);
  bool is_reached(Point point) const { return streams_.status(point) == PointStatus::Reached; }  // if it is polled
  // Do commands enqueued on `waiter` from now on run after `point`, by the waits that are known?
  bool is_ordered(StreamId waiter, Point point) const REQUIRES(gil);
  void remember(const Made& made) REQUIRES(gil);
  // Can the stream of this memory be told to wait? See Note [Streams that may be destroyed].
  bool can_wait_to_drop(const DeviceBytes& bytes) const {
    return bytes.is_buffer ? can_be_used(bytes.stream) : is_lasting(bytes.stream);
  }
  // May the memory be dropped now? Makes the wait that it takes, on the stream or else on the host, which may block.
  bool may_be_dropped(const DeviceBytes& bytes, Rule rule) REQUIRES(gil);
  void free_deferred_list() REQUIRES(gil);

  Streams& streams_;
  const bool has_polled_;
  std::vector<Made> made_ GUARDED_BY(gil);          // the latest wait of each pair of streams that are lasting
  std::vector<Deferred> deferred_ GUARDED_BY(gil);  // in the order of the calls of defer_free()
};

}  // namespace torchoffload
