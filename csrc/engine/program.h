// program: the engine's questions to the program around it, which PyTorch runs: operators, graph tasks, errors,
// warnings.
// Ownership:     none, except the callback that at_end_of_graph_task() hands to the graph task.
// Thread safety: any thread, with the GIL or without it. The answers are about the calling thread.
//
// The functions of this header are defined in autograd/program.cpp: the engine is compiled without PyTorch's headers.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

namespace torchoffload {

// One graph task is one call of autograd's engine.
inline constexpr int kNoGraphTask = -1;

namespace program {

// The sequence number that autograd will give to the next node of its graph on this thread. Once it has grown, the
// operator that ran before has ended.
uint64_t sequence_number();

// Is the thread below autograd, inside an operator?
bool is_inside_operator();

// The graph task that the thread works for, or kNoGraphTask.
int graph_task();

// Does the current graph task leave its graph for a later one (retain_graph)?
bool keeps_graph();

// Has autograd make `call` at the end of the current graph task if that succeeds, on some thread and without the GIL.
// `call` is destroyed with the graph task, also if that fails.
void at_end_of_graph_task(std::function<void()> call);

// May this error of allocating device memory mean that there is none? True of each error that PyTorch raises.
bool is_out_of_memory(const std::exception& error);

// Gives a warning from code that may neither run Python nor throw.
void warn(const std::string& text) noexcept;

}  // namespace program

}  // namespace torchoffload
