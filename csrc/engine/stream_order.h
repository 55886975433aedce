// StreamOrder: the one place that makes a stream wait, and that drops what a copy still touches.
// Ownership:     memory that was retired and may not be handed on yet.
// Thread safety: needs the GIL, but for a Batch while its calls are made. What may block releases the GIL: what was
//                read of the ledger before must be read again after.
// Failures:      a wait that throws was not made, and is not remembered. retire() never throws.
// Stream order:  each wait is named by its Rule. A wait that is known to have been made is not made again.
// Shutdown:      part of its engine; see Note [No CUDA after main].
#pragma once

#include <array>
#include <cstddef>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include "core/mutant.h"
#include "core/types.h"
#include "device/memory.h"
#include "device/streams.h"
#include "engine/operation.h"

namespace torchoffload {

// Every wait of one stream for another, with its rule in docs/design.md. The test build can leave each one out.
enum class Rule : uint8_t {
  // R2. offload_stream waits for the stream that was current at the pack: the operator that fills the source is on it.
  OffloadWaitsForCompute = static_cast<uint8_t>(Mutant::OffloadWaitsForCompute),
  // R2. offload_stream waits for the stream that the source's memory was allocated on: a custom Function may fill what
  // it saves on a stream of its own, which the program joins later.
  OffloadWaitsForAllocation = static_cast<uint8_t>(Mutant::OffloadWaitsForAllocation),
  // R5. offload_stream waits for the slot's former users: its bytes are being read, or written, until then.
  OffloadWaitsForGuards = static_cast<uint8_t>(Mutant::OffloadWaitsForGuards),
  // R3. The source's stream waits for the copy out where the window is full: later work there may be given the memory.
  ComputeWaitsForOffload = static_cast<uint8_t>(Mutant::ComputeWaitsForOffload),
  // R6. reload_stream waits for the stream that allocated the buffer: its memory may be in use there until then.
  ReloadWaitsForCompute = static_cast<uint8_t>(Mutant::ReloadWaitsForCompute),
  // R6. reload_stream waits for the copy out: the slot's bytes are complete only then.
  ReloadWaitsForOffload = static_cast<uint8_t>(Mutant::ReloadWaitsForOffload),
  // R5. A reload on another stream than the last one waits for that one: the slot is guarded by the latest point alone.
  ReloadWaitsForReload = static_cast<uint8_t>(Mutant::ReloadWaitsForReload),
  // R7. The consumer's stream waits for the copy in: the buffer's bytes are there only then.
  ConsumerWaitsForReload = static_cast<uint8_t>(Mutant::ConsumerWaitsForReload),
  // R7. A consumer on another stream than the first one waits as the first did.
  LaterConsumerWaitsForReload = static_cast<uint8_t>(Mutant::LaterConsumerWaitsForReload),
  // R7. A consumer that is given what an earlier one still holds waits for its copy in, too.
  ConsumerWaitsForGivenUp = static_cast<uint8_t>(Mutant::ConsumerWaitsForGivenUp),
  // R9. The stream of a source that is dropped waits for the copy out: later work there may be given the memory.
  DroppedSourceWaitsForOffload = static_cast<uint8_t>(Mutant::DroppedSourceWaitsForOffload),
  // R9. The stream of a buffer that is dropped waits for the copy in, likewise.
  DroppedBufferWaitsForReload = static_cast<uint8_t>(Mutant::DroppedBufferWaitsForReload),
};

// Device memory with the point until which a copy in flight touches it, and the stream that must be told to wait for
// that point before the memory may be handed on (R9).
struct DeviceBytes {
  Memory memory;
  uint64_t base_bytes = 0;  // where its first byte stands in the memory that was packed
  StreamId stream = kNoStream;
  Point busy_until;
  bool is_buffer = false;  // allocated by us on `stream`
};

class StreamOrder {
  struct Made {
    StreamId waiter;
    StreamId producer;
    uint64_t serial;
  };

 public:
  explicit StreamOrder(Streams& streams) : streams_(streams) {}

  // ---- streams ----

  // Of a point on I/O: whether it was reached has to be asked for, since no stream order protects what is touched until
  // then.
  bool is_polled(Point point) const { return streams_.completion(point.stream) == Completion::ByPolling; }

  // Is it known, without any wait, that this point was reached? Never of a point that is not polled.
  bool is_seen_reached(Point point) const { return is_polled(point) && is_reached(point); }

  bool is_lasting(StreamId stream) const {
    return streams_.is_lasting(stream) || mutated(Mutant::StreamsMayBeDestroyed);
  }

  // May a call of ours name it? See Note [Streams that may be destroyed].
  bool can_be_used(StreamId stream) const { return stream == streams_.current_stream() || is_lasting(stream); }

  // ---- waits ----

  // `waiter` waits for `point`, unless it is known to have waited for it, or for a later one of that stream. May block.
  void wait(Rule rule, StreamId waiter, Point point);

  // The host waits. Blocks.
  void synchronize(Point point);

  // Would wait() make a wait?
  bool must_wait(Rule rule, StreamId waiter, Point point) const;

  // Waits that are made without the GIL, among the calls that they order. remember() takes note of them afterwards.
  class Batch {
   public:
    explicit Batch(Streams& streams) : streams_(streams) { made_.reserve(4); }
    void wait(Rule rule, StreamId waiter, Point point);

   private:
    friend class StreamOrder;
    Streams& streams_;
    // The first ones take no memory from the heap.
    alignas(Made) std::array<std::byte, 4 * sizeof(Made)> first_bytes_;
    std::pmr::monotonic_buffer_resource memory_{first_bytes_.data(), first_bytes_.size()};
    std::pmr::vector<Made> made_{&memory_};
  };
  Batch batch() const { return Batch(streams_); }
  void remember(const Batch& batch);

  // Makes calls that may block on `stream`.
  template <typename Call>
  void without_gil(StreamId stream, Call call) {
    std::optional<BlockingSection> blocking;
    if (streams_.may_block(stream)) blocking.emplace();
    call();
  }

  // ---- memory ----

  // Drops memory after its stream was told to wait for the copy that touches it (R9), as `rule` says. What cannot wait
  // now, because I/O is in flight, a graph is being captured or the device fails, is tried again by reap(). May block,
  // but not where that point is polled.
  void retire(DeviceBytes bytes, Rule rule) noexcept;

  // Drops what was retired and may be dropped by now. May block, but not for what is polled.
  void reap();

  // Drops all that was retired and is polled: the host waits for the I/O. Blocks.
  void finish_retired();

 private:
  struct Retired {
    DeviceBytes bytes;
    Rule rule;
  };

  static bool is_left_out(Rule rule);
  bool is_reached(Point point) const { return streams_.status(point) == PointStatus::Reached; }  // where it is polled
  bool is_ordered(StreamId waiter, Point point) const;
  void remember(const Made& made);
  bool may_be_dropped(const DeviceBytes& bytes, Rule rule);

  Streams& streams_;
  std::vector<Made> made_;        // the latest of each pair of streams that last
  std::vector<Retired> retired_;  // in the order in which it was retired
};

}  // namespace torchoffload
