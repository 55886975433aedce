#include "engine/coded_link.h"

#include <exception>
#include <utility>

#include "engine/program.h"

namespace torchoffload {

namespace {

// A range of a slot, as the link is given it.
Slot part_of(const Slot& slot, const Span& span) {
  Slot part = slot;
  part.address += span.begin;
  return part;
}

}  // namespace

std::optional<CodedLink::Staging> CodedLink::prepare() const {
  if (!exists() || !backend_.coder->prepare()) return std::nullopt;
  Staging staging;
  try {
    for (size_t lane = 0; lane < out_.lanes.size() + in_.lanes.size(); ++lane)
      staging.lanes.push_back(backend_.memory.allocate(lane_bytes(), 0));
  } catch (const std::exception& error) {
    if (!program::is_out_of_memory(error)) throw;
    return std::nullopt;
  }
  staging.stream = backend_.streams.current_stream();
  staging.allocated = backend_.streams.record(staging.stream);
  return staging;
}

void CodedLink::adopt(Staging staging) {
  for (Direction* const direction : {&out_, &in_}) {
    for (Lane& lane : direction->lanes) {
      lane = {std::move(staging.lanes.back()), staging.stream, staging.allocated};
      staging.lanes.pop_back();
      staging_bytes_ += lane_bytes();
    }
  }
  is_ready_ = true;
}

std::vector<std::pair<DeviceBytes, Rule>> CodedLink::take_staging() {
  std::vector<std::pair<DeviceBytes, Rule>> taken;
  const auto take = [&](Direction& direction, StreamId freed_on, Rule rule) {
    for (Lane& lane : direction.lanes) {
      if (!lane.memory) continue;
      if (lane.is_used) lane.free_after = backend_.streams.record(freed_on);
      taken.push_back({{std::move(lane.memory), 0, lane.allocated_on, lane.free_after, /*is_buffer=*/true}, rule});
      lane = {};
    }
  };
  take(out_, backend_.streams.offload_stream(), Rule::DroppedSourceWaitsForOffload);
  take(in_, decode_stream(), Rule::DroppedBufferWaitsForReload);
  is_ready_ = false;
  staging_bytes_ = 0;
  return taken;
}

CodedPiece CodedLink::on_device(const codec::Piece& piece, std::byte* raw, const Slot& slot, const Lane& lane) const {
  return {raw + piece.raw.begin, piece.raw.nbytes(), lane.memory.mutable_data(), slot.address + piece.overflow_begin};
}

// ---- copies out ----

void CodedLink::copy_out(const Slot& slot, const std::byte* source, uint64_t nbytes, uint64_t tag,
                         StreamOrder::Batch& waits, CopyTime& time, CopyProgress& progress) {
  const std::lock_guard lock(out_.mutex);
  const StreamId offload_stream = backend_.streams.offload_stream();
  try {
    encode_pieces(slot, source, nbytes, tag, waits, time, progress);
    progress.is_whole = true;
  } catch (const std::exception&) {
    if (!progress.has_begun) throw;
    try {  // the end of what was enqueued: the source and the slot are in use until then
      waits.wait(Rule::OffloadWaitsForEncode, offload_stream, backend_.streams.record(encode_stream()));
      progress.end = end_of_copy(backend_.streams, offload_stream);
    } catch (const std::exception&) {
    }
    throw;
  }
  progress.end = end_of_copy(backend_.streams, offload_stream);
}

void CodedLink::encode_pieces(const Slot& slot, const std::byte* source, uint64_t nbytes, uint64_t tag,
                              StreamOrder::Batch& waits, CopyTime& time, CopyProgress& progress) {
  const StreamId offload_stream = backend_.streams.offload_stream();
  const codec::Pieces pieces = this->pieces(nbytes);
  for (uint64_t index = 0; index < pieces.count(); ++index) {
    const codec::Piece piece = pieces.at(index);
    Lane& lane = out_.take_lane(backend_.streams, offload_stream);
    waits.wait(Rule::EncodeWaitsForStaging, encode_stream(), lane.free_after);
    backend_.coder->encode(on_device(piece, const_cast<std::byte*>(source), slot, lane), tag, encode_stream());
    progress.has_begun = true;
    waits.wait(Rule::OffloadWaitsForEncode, offload_stream, backend_.streams.record(encode_stream()));
    if (index == 0) time.begin = time_if(time.is_wanted, backend_.streams, offload_stream);
    backend_.link.copy_out(part_of(slot, piece.coded), lane.memory.data(), piece.coded.nbytes(), offload_stream);
    lane.free_after = backend_.streams.record(offload_stream);
    lane.is_used = false;
  }
}

// ---- copies in ----

void CodedLink::copy_in(std::byte* target, const Slot& slot, uint64_t nbytes, StreamOrder::Batch& waits, CopyTime& time,
                        CopyProgress& progress) {
  const std::lock_guard lock(in_.mutex);
  try {
    decode_pieces(target, slot, nbytes, waits, time, progress);
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

void CodedLink::decode_pieces(std::byte* target, const Slot& slot, uint64_t nbytes, StreamOrder::Batch& waits,
                              CopyTime& time, CopyProgress& progress) {
  const StreamId reload_stream = backend_.streams.reload_stream();
  const codec::Pieces pieces = this->pieces(nbytes);
  for (uint64_t index = 0; index < pieces.count(); ++index) {
    const codec::Piece piece = pieces.at(index);
    Lane& lane = in_.take_lane(backend_.streams, decode_stream());
    waits.wait(Rule::ReloadWaitsForStaging, reload_stream, lane.free_after);
    if (index == 0) time.begin = time_if(time.is_wanted, backend_.streams, reload_stream);
    backend_.link.copy_in(lane.memory.mutable_data(), part_of(slot, piece.coded), piece.coded.nbytes(), reload_stream);
    progress.has_begun = true;
    waits.wait(Rule::DecodeWaitsForReload, decode_stream(), backend_.streams.record(reload_stream));
    backend_.coder->decode(on_device(piece, target, slot, lane), decode_stream());
    lane.free_after = backend_.streams.record(decode_stream());
    lane.is_used = false;
  }
}

}  // namespace torchoffload
