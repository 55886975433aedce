// OperatorMode: the C base of a TorchDispatchMode that shows its operators to an OperatorListener.
// Ownership:     a mode shares its listener. The type lives as long as the process.
// Thread safety: a mode is entered and left by one thread at a time, with the GIL, and shows that thread's operators.
//                Threads that PyTorch gives the same modes (autograd's, those of torch.jit.fork) run theirs unseen.
// Failures:      as PyTorch's own modes: an exception passes through, and the mode is on again.
//
// Note [Operators in a mode]
// The mode is a real TorchDispatchMode on PyTorch's stack of modes, so it sees the operators that one in Python sees,
// in the same order among other modes, and torch.compile knows it as one. Only the way from PyTorch to the mode is
// shorter: PyTorch hands an operator to its Python interpreter, as a table of virtual functions, which makes Python
// objects of the arguments and calls `__torch_dispatch__`. Ours (interpreter_delegate.h) looks whose mode is on top,
// and hands the operator to its listener as it is. An operator that it does not take, and every operator on a torch on
// which it did not pass its test, comes by `__torch_dispatch__`, which is a function of this file and makes a C++ stack
// of the Python objects again.
//
// Each operator goes one of four ways:
// - It is shown to the listener.
// - An argument is a tensor of a class that is made of other tensors and has a __torch_dispatch__ (DTensor, jagged
//   tensors, quantized weights): that function runs with the mode on, and so the inner operators are shown.
// - It runs unseen: on another thread, in an opaque region, while FakeTensorMode or a tracer is on beneath the mode,
//   and when a saved output is detached, which autograd does once for each and PyTorch shows to modes as aten::detach.
// - It cannot be put on a stack: the mode's method `on_other` gets it, which by itself shows an opaque region.
#pragma once

#include <torch/csrc/python_headers.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "autograd/operator_listener.h"

namespace torchoffload {

// The C++ part of a mode's Python object.
struct OperatorMode {
  std::shared_ptr<OperatorListener> listener;
  // The thread that entered the mode last. Another one may read it, which has been given the mode by PyTorch.
  std::atomic<std::thread::id> thread{};
  uint32_t opaque_depth = 0;  // of that thread: the opaque regions that it is in

  // Whether an operator is shown for which PyTorch has taken the mode off this thread's stack.
  bool shows() const;
};

// Adds the type `OperatorMode` to the module. Its constructor takes the result of `to_python`. Returns false with a
// Python error set.
bool add_operator_mode(PyObject* module);

// A new reference to a capsule that shares the listener, for the constructor of a mode; null with a Python error set.
PyObject* to_python(std::shared_ptr<OperatorListener> listener);

// The listener that such a capsule shares. Throws python_error for any other object.
const std::shared_ptr<OperatorListener>& listener_of(PyObject* capsule);

// The mode that the next operator of this thread goes to, if it is one of ours; else null. Needs no GIL.
OperatorMode* mode_on_top();

// How many operators the `__torch_dispatch__` of our modes was called for, in this process.
uint64_t operators_by_python();

// Returns a new reference to a function for a class to have in place of its method `function`, whose calls it makes:
// each is an opaque region. Costs nothing worth mentioning while no mode of ours is on.
PyObject* opaque_method(PyObject* function, const char* name);

}  // namespace torchoffload
