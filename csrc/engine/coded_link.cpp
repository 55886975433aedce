#include "engine/coded_link.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "engine/program.h"
#include "system/mutex.h"

namespace torchoffload {

namespace {

// A range of a slot, as the link is given it.
Slot part_of(const Slot& slot, const Span& span) {
  Slot part = slot;
  part.address += span.begin;
  return part;
}

}  // namespace

uint64_t CodedLink::lane_bytes() const {
  uint64_t most_bytes = 0;
  for (const codec::Code code : codec::kCodes)
    most_bytes = std::max(most_bytes, codec::most_coded_bytes(code, backend_.coder->piece_bytes()));
  return most_bytes;
}

std::optional<CodedLink::Staging> CodedLink::allocate_staging() const {
  constexpr size_t kFewestLanes = 2;  // one is coded while the other is copied
  for (size_t lane_count = backend_.coder->lane_count(); lane_count >= kFewestLanes; lane_count /= 2) {
    if (auto staging = try_allocate(lane_count)) return staging;
  }
  return std::nullopt;
}

std::optional<CodedLink::Staging> CodedLink::try_allocate(size_t lane_count) const {
  Staging staging;
  staging.lane_count = lane_count;
  try {
    staging.out = backend_.memory.allocate(lane_count * lane_bytes(), 0);
    staging.in = backend_.memory.allocate(lane_count * lane_bytes(), 0);
  } catch (const std::exception& error) {
    if (!program::is_out_of_memory(error)) throw;
    return std::nullopt;
  }
  staging.stream = backend_.streams.current_stream();
  staging.allocated = backend_.streams.record(staging.stream);
  return staging;
}

void CodedLink::adopt(Staging staging) {
  const auto give = [&](Direction& direction, Memory memory) {
    const MutexLock lock(direction.mutex);
    direction.memory = std::move(memory);
    direction.allocated_on = staging.stream;
    direction.next = 0;
    for (size_t lane = 0; lane < staging.lane_count; ++lane)
      direction.lanes.push_back({direction.memory.mutable_data() + lane * lane_bytes(), staging.allocated});
  };
  give(out_, std::move(staging.out));
  give(in_, std::move(staging.in));
  staging_bytes_ = 2 * staging.lane_count * lane_bytes();
  is_ready_ = true;
}

std::vector<std::pair<DeviceBytes, Rule>> CodedLink::take_staging() {
  std::vector<std::pair<DeviceBytes, Rule>> taken;
  const auto take = [&](Direction& direction, StreamId freed_on, Rule rule) {
    const MutexLock lock(direction.mutex);
    if (!direction.memory) return;
    const Lane& latest = direction.latest_lane();
    const Point free_after = latest.is_used ? backend_.streams.record(freed_on) : latest.free_after;
    direction.lanes.clear();
    taken.push_back({{std::move(direction.memory), 0, direction.allocated_on, free_after, /*is_buffer=*/true}, rule});
  };
  take(out_, backend_.streams.offload_stream(), Rule::DroppedSourceWaitsForOffload);
  take(in_, decode_stream(), Rule::DroppedBufferWaitsForReload);
  is_ready_ = false;
  staging_bytes_ = 0;
  return taken;
}

CodedPiece CodedLink::on_device(codec::Code code, const codec::Piece& piece, std::byte* raw, const Slot& slot,
                                const Lane& lane) {
  return {code, raw + piece.raw.begin, piece.raw.nbytes(), lane.coded, slot.address + piece.overflow_begin};
}

// ---- copies out ----

void CodedLink::copy_out(const Slot& slot, const std::byte* source, const codec::Pieces& pieces, uint64_t tag,
                         StreamOrder::Batch& waits, CopyTime& time, CopyProgress& progress) {
  const MutexLock lock(out_.mutex);
  const StreamId offload_stream = backend_.streams.offload_stream();
  try {
    encode_pieces(slot, source, pieces, tag, waits, time, progress);
    progress.is_whole = true;
  } catch (const std::exception&) {
    if (!progress.has_begun) throw;
    try {  // the end of the enqueued commands: the source and the slot are in use until then
      waits.wait(Rule::OffloadWaitsForEncode, offload_stream, backend_.streams.record(encode_stream()));
      progress.end = end_of_copy(backend_.streams, offload_stream);
    } catch (const std::exception&) {
    }
    throw;
  }
  progress.end = end_of_copy(backend_.streams, offload_stream);
}

void CodedLink::encode_pieces(const Slot& slot, const std::byte* source, const codec::Pieces& pieces, uint64_t tag,
                              StreamOrder::Batch& waits, CopyTime& time, CopyProgress& progress) {
  const StreamId offload_stream = backend_.streams.offload_stream();
  for (uint64_t index = 0; index < pieces.count(); ++index) {
    const codec::Piece piece = pieces.at(index);
    Lane& lane = out_.take_lane(backend_.streams, offload_stream);
    waits.wait(Rule::EncodeWaitsForStaging, encode_stream(), lane.free_after);
    auto* const raw = const_cast<std::byte*>(source);
    backend_.coder->encode(on_device(pieces.code(), piece, raw, slot, lane), tag, encode_stream());
    progress.has_begun = true;
    waits.wait(Rule::OffloadWaitsForEncode, offload_stream, backend_.streams.record(encode_stream()));
    if (index == 0) time.begin = time_if(time.is_wanted, backend_.streams, offload_stream);
    backend_.link.copy_out(part_of(slot, piece.coded), lane.coded, piece.coded.nbytes(), offload_stream);
    lane.free_after = backend_.streams.record(offload_stream);
    lane.is_used = false;
  }
}

// ---- copies in ----

void CodedLink::copy_in(std::byte* target, const Slot& slot, const codec::Pieces& pieces, StreamOrder::Batch& waits,
                        CopyTime& time, CopyProgress& progress) {
  const MutexLock lock(in_.mutex);
  try {
    decode_pieces(target, slot, pieces, waits, time, progress);
    progress.is_whole = true;
  } catch (const std::exception&) {
    if (!progress.has_begun) throw;
    try {  // as in copy_out()
      waits.wait(Rule::DecodeWaitsForReload, decode_stream(),
                 backend_.streams.record(backend_.streams.reload_stream()));
      progress.end = end_of_copy(backend_.streams, decode_stream());
    } catch (const std::exception&) {
    }
    throw;
  }
  progress.end = end_of_copy(backend_.streams, decode_stream());
}

void CodedLink::decode_pieces(std::byte* target, const Slot& slot, const codec::Pieces& pieces,
                              StreamOrder::Batch& waits, CopyTime& time, CopyProgress& progress) {
  const StreamId reload_stream = backend_.streams.reload_stream();
  for (uint64_t index = 0; index < pieces.count(); ++index) {
    const codec::Piece piece = pieces.at(index);
    Lane& lane = in_.take_lane(backend_.streams, decode_stream());
    waits.wait(Rule::ReloadWaitsForStaging, reload_stream, lane.free_after);
    if (index == 0) time.begin = time_if(time.is_wanted, backend_.streams, reload_stream);
    backend_.link.copy_in(lane.coded, part_of(slot, piece.coded), piece.coded.nbytes(), reload_stream);
    progress.has_begun = true;
    waits.wait(Rule::DecodeWaitsForReload, decode_stream(), backend_.streams.record(reload_stream));
    backend_.coder->decode(on_device(pieces.code(), piece, target, slot, lane), decode_stream());
    lane.free_after = backend_.streams.record(decode_stream());
    lane.is_used = false;
  }
}

}  // namespace torchoffload
