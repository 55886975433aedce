// program: what the engine asks of the program around it, which PyTorch runs: operators, graph tasks, errors, warnings.
// Ownership:     none, but for the callback that at_end_of_graph_task() hands to the graph task.
// Thread safety: any thread, with the GIL or without it. The answers are about the calling thread.
//
// What is declared here is defined in autograd/program.cpp: the engine is compiled without PyTorch's headers.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

namespace torchoffload {

// One graph task is one call of autograd's engine.
inline constexpr int kNoGraphTask = -1;

namespace program {

// That autograd gives to the next node of its graph. Once it has moved on, the operator of before has ended.
uint64_t sequence_number();

// Is the thread below autograd, inside an operator?
bool is_inside_operator();

// The graph task that the thread works for, or kNoGraphTask.
int graph_task();

// Of the current graph task: does it leave its graph for another one?
bool keeps_graph();

// `call` is called at the end of the current graph task, on some thread and without the GIL, if that succeeds. It is
// destroyed when the graph task is, however it ends.
void at_end_of_graph_task(std::function<void()> call);

// Does the device's allocator say by this error that it has no memory?
bool is_out_of_memory(const std::exception& error);

// A warning from where no Python may run and nothing may be thrown.
void warn(const std::string& text) noexcept;

}  // namespace program

}  // namespace torchoffload
