// cuda_graph_pools: which memory PyTorch's CUDA graph trees (torch.compile, mode="reduce-overhead") manage by
// themselves.
// Ownership:     ids of pools and addresses, which are kept for the life of the process.
// Thread safety: every function, any thread.
//
// Note [Memory of graph trees]
// Saved tensors of a compiled region are kept if a tree made them. There are two reasons. First, the region's backward
// is recorded for saved tensors at the addresses that they had. If they come back elsewhere, the tree records it anew
// in the middle of the step. To find out which memory it may overwrite then, it looks at references from Python only: a
// gradient that waits inside autograd for its other summands is held in C++ alone, and is overwritten. That is
// PyTorch's own behaviour, under any hooks. Second, the next replay may overwrite an output that nobody holds, with no
// new storage or version. To drop the source of such a saved tensor would tell the tree that it may.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <utility>
#include <vector>

namespace torchoffload {

using GraphPool = std::pair<c10::DeviceIndex, c10::MempoolId_t>;

// May the allocator's segments have changed, on any device, since this thread asked last?
bool graph_pools_may_have_changed();

// Adds pools of trees. From here on the memory that all known pools have now counts as a tree's.
void add_graph_pools(const std::vector<GraphPool>& pools);

bool is_in_graph_pool(const void* address);

}  // namespace torchoffload
