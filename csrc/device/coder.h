// Coder: codes what a copy moves, on the device, so that less crosses the link. A part of a Backend that has one.
// Ownership:     keeps no reference to memory after a call. What is enqueued touches raw, coded and overflow bytes
//                until it has run.
// Thread safety: every method, any thread. encode() and decode() may block, as Streams::may_block() says.
// Failures:      a call that throws has enqueued nothing.
// Stream order:  what is enqueued waits for nothing else. encode_stream() and decode_stream() are ours, as
//                offload_stream() and reload_stream() are.
// Shutdown:      lives for the process; see Note [No CUDA after main].
//
// The code is that of Note [The code for bfloat16].
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/types.h"

namespace torchoffload {

// A piece of a record; see device/codec/piece.h.
struct CodedPiece {
  std::byte* raw = nullptr;  // device memory; not written by encode()
  uint64_t raw_bytes = 0;
  std::byte* coded = nullptr;     // device memory, at a multiple of 128
  std::byte* overflow = nullptr;  // in the record's slot
};

class Coder {
 public:
  virtual ~Coder() = default;

  // Makes the code ready, and compares what the device does with what it has to do; once, and quickly after that.
  // Returns whether it can be used. Blocks: call it without the GIL. Throws nothing.
  virtual bool prepare() = 0;

  // Why prepare() has returned false; empty: it has not.
  virtual std::string obstacle() const = 0;

  // Are values of this dtype coded? By PyTorch's number for it.
  virtual bool knows(uint8_t dtype) const = 0;

  virtual uint64_t least_bytes() const = 0;  // a smaller record is not worth the calls
  virtual uint64_t piece_bytes() const = 0;  // a multiple of codec::kBlockBytes

  virtual StreamId encode_stream() = 0;
  virtual StreamId decode_stream() = 0;

  // `tag`: see Note [The code for bfloat16].
  virtual void encode(const CodedPiece& piece, uint64_t tag, StreamId stream) = 0;
  virtual void decode(const CodedPiece& piece, StreamId stream) = 0;
};

}  // namespace torchoffload
