// cuda_graph_pools: which memory PyTorch's CUDA graph trees (torch.compile, mode="reduce-overhead") manage by
// themselves.
// Ownership:     addresses, which are kept for the life of the process.
// Thread safety: every function, any thread.
//
// Note [Memory of graph trees]
// Saved tensors of a compiled region are kept if a tree made them. There are two reasons. First, the region's backward
// is recorded for saved tensors at the addresses that they had. If they come back elsewhere, the tree records it anew
// in the middle of the step. To find out which memory it may overwrite then, it looks at references from Python only: a
// gradient that waits inside autograd for its other summands is held in C++ alone, and is overwritten. That is
// PyTorch's own behaviour, under any hooks. Second, the next replay may overwrite an output to which no reference is
// left, with no new storage or version. If the source of such a saved tensor were dropped, the tree would take its
// memory as free.
#pragma once

#include "device/graph_pools.h"

namespace torchoffload {

GraphPools& cuda_graph_pools();

bool is_in_graph_pool(const void* address);

}  // namespace torchoffload
