// Memory that PyTorch's CUDA graph trees (torch.compile, mode="reduce-overhead") manage by themselves.
// Ownership:     addresses only; they live for the process.
// Thread safety: every function and method, any thread.
//
// Note [Memory of graph trees]
// A region's saved tensors stay where they are when a tree made them. Its backward is recorded for saved tensors at the
// addresses of then. Where they come back elsewhere, the tree records it anew, in the middle of the step; and for what
// may be overwritten it asks who holds its outputs in Python alone. A gradient that waits inside autograd for its other
// summands is held in C++ alone, and is overwritten: PyTorch's own, under any hooks. And since an output that nobody
// holds may be written anew by the next replay, with no new storage or version, to let go of one tells the tree so.
#pragma once

#include "device/graph_pools.h"

namespace torchoffload {

GraphPools& cuda_graph_pools();

bool is_in_graph_pool(const void* address);

}  // namespace torchoffload
