// CodedLink: copies between a device and slots whose bytes cross the link as a code, by way of device memory of ours.
// Ownership:     the staging memory: one block for each direction, cut into lanes, which hold coded bytes on their way.
// Thread safety: copy_out() and copy_in(), any thread, without the GIL; both may block. The rest needs the GIL.
// Failures:      when copy_out() or copy_in() throws, a part of the copy may have been enqueued: `progress` says so.
// Stream order:  each wait is named by its Rule. Coding runs on a stream of the Coder's beside the copies of the link,
//                so that some lanes are coded while another is copied.
// Shutdown:      part of its engine; see Note [No CUDA after main].
//
// The caller makes the waits that any copy needs: of a copy out, encode_stream() waits for the operators and for the
// slot's guards; of a copy in, reload_stream waits for the slot's bytes, and decode_stream() for the buffer's memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/backend.h"
#include "device/codec/codes.h"
#include "device/coder.h"
#include "engine/copy_time.h"
#include "engine/stream_order.h"
#include "storage/slot_store.h"
#include "system/mutex.h"

namespace torchoffload {

// The progress of a copy: its commands that were enqueued.
struct CopyProgress {
  bool has_begun = false;
  bool is_whole = false;
  Point end;  // of the enqueued commands; the beginning: the end is not known
};

class CodedLink {
 public:
  explicit CodedLink(const Backend& backend) : backend_(backend) {}

  // Does the backend have a Coder at all?
  bool exists() const { return backend_.coder != nullptr; }
  // Why the Coder cannot be used; empty: no obstacle was found, or it was not asked for.
  std::string obstacle() const { return exists() ? backend_.coder->obstacle() : std::string(); }

  // Device memory for the lanes of both directions.
  struct Staging {
    Memory out, in;
    size_t lane_count = 0;        // of each direction
    StreamId stream = kNoStream;  // that it was allocated on
    Point allocated;
  };
  // Begins to make the code ready, in the background. Returns at once, and says whether it is ready.
  bool prepare_code() const { return exists() && backend_.coder->prepare(); }
  // Staging memory for copies, allocated on the current stream. If memory is scarce there are fewer lanes than the
  // Coder asks for. nullopt: there is no memory for two lanes each way. Blocks. Not while a graph is captured.
  std::optional<Staging> allocate_staging() const EXCLUDES(gil);
  // Call it while is_ready() is false. From here on copies can be made.
  void adopt(Staging staging);
  bool is_ready() const { return is_ready_; }

  // The code for a record of so many bytes of this dtype. nullopt: it cannot be coded.
  std::optional<codec::Code> code_of(uint8_t dtype, uint64_t nbytes) const {
    if (!is_ready_ || nbytes < backend_.coder->least_bytes()) return std::nullopt;
    return backend_.coder->code_of(dtype);
  }

  // The same as far as it is known, also before is_ready().
  std::optional<codec::Code> expected_code(uint8_t dtype, uint64_t nbytes) const {
    if (!exists() || !obstacle().empty() || nbytes < backend_.coder->least_bytes()) return std::nullopt;
    return backend_.coder->code_of(dtype);
  }

  codec::Pieces pieces(codec::Code code, uint64_t nbytes) const {
    return {code, nbytes, backend_.coder->piece_bytes()};
  }

  // The stream that reads the source, and writes to the slot first.
  StreamId encode_stream() const { return backend_.coder->encode_stream(); }
  // The stream that writes the buffer.
  StreamId decode_stream() const { return backend_.coder->decode_stream(); }

  // Enqueues a copy. `tag` names the record; see Note [Pieces of a record]. It ends on offload_stream.
  void copy_out(const Slot& slot, const std::byte* source, const codec::Pieces& pieces, uint64_t tag,
                StreamOrder::Batch& waits, CopyTime& time, CopyProgress& progress);
  // Enqueues a copy back of the pieces that copy_out() wrote. It ends on decode_stream.
  void copy_in(std::byte* target, const Slot& slot, const codec::Pieces& pieces, StreamOrder::Batch& waits,
               CopyTime& time, CopyProgress& progress);

  uint64_t staging_bytes() const { return staging_bytes_; }

  // Hands over the staging memory, which the caller frees by defer_free(). Call it while no copy is being enqueued.
  std::vector<std::pair<DeviceBytes, Rule>> take_staging();

 private:
  struct Lane {
    std::byte* coded = nullptr;
    Point free_after;      // its present user is done with it then
    bool is_used = false;  // a copy that uses it was begun, and its end is not in free_after
  };
  // The lanes of one direction. The mutex is held while a copy is enqueued. Only copies of the same direction take it,
  // and those would wait for the same streams anyway.
  struct Direction {
    Mutex mutex;
    Memory memory GUARDED_BY(mutex);
    StreamId allocated_on GUARDED_BY(mutex) = kNoStream;
    std::vector<Lane> lanes GUARDED_BY(mutex);
    size_t next GUARDED_BY(mutex) = 0;

    // The lane that was used longest ago, and the point after which it is free. `freed_on`: the stream of its last use.
    // If a copy failed on the way, that point is recorded only now.
    Lane& take_lane(Streams& streams, StreamId freed_on) REQUIRES(mutex) {
      Lane& lane = lanes[next];
      next = (next + 1) % lanes.size();
      if (lane.is_used) lane.free_after = streams.record(freed_on);
      lane.is_used = true;
      return lane;
    }
    // The lane that was used last: once it is free all are, since their last uses are on one stream.
    const Lane& latest_lane() const REQUIRES(mutex) { return lanes[(next + lanes.size() - 1) % lanes.size()]; }
  };

  // Room for a piece of any code.
  uint64_t lane_bytes() const;
  // Both directions' memory with so many lanes each; nullopt: there is not enough.
  std::optional<Staging> try_allocate(size_t lane_count) const;
  static CodedPiece on_device(codec::Code code, const codec::Piece& piece, std::byte* raw, const Slot& slot,
                              const Lane& lane);
  void encode_pieces(const Slot& slot, const std::byte* source, const codec::Pieces& pieces, uint64_t tag,
                     StreamOrder::Batch& waits, CopyTime& time, CopyProgress& progress) REQUIRES(out_.mutex);
  void decode_pieces(std::byte* target, const Slot& slot, const codec::Pieces& pieces, StreamOrder::Batch& waits,
                     CopyTime& time, CopyProgress& progress) REQUIRES(in_.mutex);

  const Backend backend_;
  bool is_ready_ = false;
  uint64_t staging_bytes_ = 0;
  Direction out_, in_;
};

}  // namespace torchoffload
