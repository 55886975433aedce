// SimHeap: the memory of the simulated devices, with a pool of freed blocks for each stream that allocates.
// Ownership:     a block is its holder's until free(); freed memory stays mapped until release_pools(), so that a copy
//                that comes too late reads rubbish, and never crashes.
// Thread safety: none; SimWorld locks.
// Stream order:  a freed block goes to the next allocation of its size on the same stream, at once and last in first
//                out, as CUDA's caching allocator would hand it out: a wrong free shows as wrong bytes.
// Shutdown:      never destroyed; blocks may outlive the simulation they were allocated in, and every static object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/types.h"
#include "testing/sim_clock.h"

namespace torchoffload {

struct SimBlock {
  std::byte* address = nullptr;
  uint64_t nbytes = 0;      // a multiple of kAlignmentBytes, and the address is one too
  uint64_t simulation = 0;  // in which it was allocated
  uint64_t number = 0;      // of the allocation, from 1
  int device = 0;
  StreamId stream = kNoStream;  // that allocated it
  MemoryOwner owner = MemoryOwner::Source;
  std::vector<StreamId> users;  // other streams, told by note_use

  Span span() const {
    const auto begin = reinterpret_cast<uint64_t>(address);
    return {begin, begin + nbytes};
  }
};

class SimHeap {
 public:
  // Poisoned memory. Throws std::bad_alloc.
  SimBlock& allocate(uint64_t nbytes, int device, StreamId stream, MemoryOwner owner, uint64_t simulation);

  // The block that holds `address`, or null: memory that is foreign, or free.
  SimBlock* find(const void* address);

  // Poisons a block of the running simulation and gives it to its stream's pool; or leaves it as it is until
  // release_pools(), for a queue that may still touch it.
  enum class Reuse : uint8_t { AtOnce, Never };
  void free(const SimBlock& block, Reuse reuse);

  // Gives a block of an earlier simulation back to the system.
  void free_to_system(const SimBlock& block);

  void release_pools();
  void reset_statistics();

  uint64_t allocated_bytes(int device) const;
  uint64_t peak_bytes(int device) const;
  uint64_t take_peak_bytes(int device);  // and begin anew with what is allocated

 private:
  struct Usage {
    uint64_t allocated_bytes = 0;
    uint64_t peak_bytes = 0;
  };
  using Bin = std::pair<StreamId, uint64_t>;  // stream, block size

  std::map<const std::byte*, SimBlock> blocks_;  // in use
  std::map<Bin, std::vector<std::byte*>> pools_;
  std::vector<std::byte*> withheld_;
  std::map<int, Usage> usage_;  // of the running simulation
  uint64_t allocation_count_ = 0;
};

}  // namespace torchoffload
