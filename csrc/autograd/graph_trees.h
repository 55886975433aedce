// Tells the backends which memory PyTorch's CUDA graph trees manage; see Note [Memory of graph trees].
#pragma once

namespace torchoffload {

// Called before each hook event, outside any operation, since it may run Python. Without trees it costs a look into
// sys.modules, and nothing where no kind of backend knows CUDA graphs; with trees that are warm, the allocator's
// counters besides. False with a Python error set.
bool look_for_graph_trees();

}  // namespace torchoffload
