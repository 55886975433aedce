// graph_trees: tells the backends which memory PyTorch's CUDA graph trees manage; see Note [Memory of graph trees].
// Ownership:     none; it passes on the ids of the trees' memory pools.
// Thread safety: needs the GIL. The calling thread's trees are asked, since each thread has trees of its own.
#pragma once

namespace torchoffload {

// Called before each hook event, outside any operation, since it may run Python. Without trees it costs a look into
// sys.modules, and nothing if no kind of backend knows CUDA graphs; with trees that are warm, the allocator's counters
// besides. False with a Python error set.
bool look_for_graph_trees();

}  // namespace torchoffload
