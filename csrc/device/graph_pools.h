// GraphPools: the memory that PyTorch's CUDA graph trees manage, reported to a kind of backend.
// Ownership:     addresses only; they live for the process.
// Thread safety: every method, any thread.
//
// See Note [Memory of graph trees].
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace torchoffload {

// A device's index, and the id of a private pool of its allocator.
using GraphPool = std::pair<int, std::pair<uint64_t, uint64_t>>;

class GraphPools {
 public:
  virtual ~GraphPools() = default;

  // May the allocator's segments, on any device, have changed since this thread asked last?
  virtual bool may_have_changed() = 0;

  // Notes that the present memory of these pools, and of those named before, is a tree's.
  virtual void add(const std::vector<GraphPool>& pools) = 0;
};

}  // namespace torchoffload
