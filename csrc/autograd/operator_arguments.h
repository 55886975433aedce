// Operators between Python and C++: OpOverloads, stacks of arguments and results, tensors in containers.
// Ownership:     returned objects are the caller's; an operator's handle is remembered for the life of the process.
// Thread safety: needs the GIL.
// Failures:      throws python_error, or returns null with a Python error set, as each function says.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/python_headers.h>

#include <optional>
#include <vector>

namespace torchoffload {

// The operator of an OpOverload; nothing for other things that Python may call an operator: one that takes functions,
// one that takes objects of Python classes.
std::optional<c10::OperatorHandle> operator_of(PyObject* function);

// Puts the arguments on an empty stack, with the schema's default for each that is not given. False: an argument has
// another type than in the schema, is missing, or is one too many. No error is set.
bool fill_stack(const c10::FunctionSchema& schema, PyObject* args, PyObject* kwargs, torch::jit::Stack& stack);

// The value that an operator with these results returns in Python: None, the one result, or a tuple. A tensor that is
// an argument is the argument's Python object. Null: an error is set.
PyObject* results_in(torch::jit::Stack&& stack);

// The tensors in a nest of tuples, lists and dicts; those of other containers are not found.
std::vector<at::Tensor> tensors_in(PyObject* value);
void add_tensors_in(PyObject* value, std::vector<at::Tensor>& tensors);

}  // namespace torchoffload
