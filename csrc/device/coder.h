// Coder: codes a copy's bytes, on the device, so that less crosses the link. A part of a Backend that has one.
// Ownership:     keeps no reference to memory after a call. Enqueued work touches raw, coded and overflow bytes until
//                it has run.
// Thread safety: every method, any thread. encode() and decode() may block, as Streams::may_block() says.
// Failures:      a call that throws has enqueued nothing.
// Stream order:  enqueued work waits for nothing else. encode_stream() and decode_stream() are ours, as
//                offload_stream() and reload_stream() are.
// Shutdown:      lives for the process; see Note [No CUDA after main].
//
// The codes are those of Note [Lossless codes].
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "core/types.h"
#include "device/codec/block.h"

namespace torchoffload {

// A piece of a record; see device/codec/piece.h.
struct CodedPiece {
  codec::Code code = codec::Code::Bfloat16;
  std::byte* raw = nullptr;  // device memory; not written by encode()
  uint64_t raw_bytes = 0;
  std::byte* coded = nullptr;     // device memory, at a multiple of 128
  std::byte* overflow = nullptr;  // in the record's slot
};

class Coder {
 public:
  virtual ~Coder() = default;

  // Begins to make the codes ready, and to compare the device's results with the host's, in the background and once.
  // Returns at once whether they are ready. The device has to be in use by the program. Throws nothing.
  virtual bool prepare() = 0;

  // Why the codes will never be ready; empty: no obstacle was found.
  virtual std::string obstacle() const = 0;

  // Blocks until the call that prepare() began has ended, well or not: for tests.
  virtual void await_prepared() {}

  // The process is about to end: nothing is prepared any more. Blocks until a preparation under way has ended.
  virtual void stop() {}

  // The code for values of this dtype, which is PyTorch's number for it. nullopt: they are not coded.
  virtual std::optional<codec::Code> code_of(uint8_t dtype) const = 0;

  virtual uint64_t least_bytes() const = 0;  // coding a smaller record costs more than it saves
  virtual uint64_t piece_bytes() const = 0;  // a multiple of codec::kLargestBlockBytes
  // How many pieces may be on their way in each direction, at least 2: the link goes on with those that are coded while
  // the coding of another waits for the program's kernels.
  virtual size_t lane_count() const = 0;

  virtual StreamId encode_stream() = 0;
  virtual StreamId decode_stream() = 0;

  // `tag`: see Note [Pieces of a record].
  virtual void encode(const CodedPiece& piece, uint64_t tag, StreamId stream) = 0;
  virtual void decode(const CodedPiece& piece, StreamId stream) = 0;
};

}  // namespace torchoffload
