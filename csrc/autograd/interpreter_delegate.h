// InterpreterDelegate: PyTorch's table of calls from libtorch to Python, with the operators of our modes taken out.
// Ownership:     one for the process, leaked on purpose: PyTorch may use it until the process ends.
// Thread safety: any thread, with the GIL or without.
// Failures:      as the operator, or the listener, that is called.
//
// libtorch knows nothing of Python. It calls Python through one table of virtual functions: counting references of
// Python objects, sizes of a tensor that a Python class answers for, and `dispatch`, which gives an operator to the
// mode on top. Ours passes each call on to that table, with two exceptions that it handles itself: an operator, and the
// detach of a saved output, if their mode is one of ours. See Note [Operators in a mode].
#pragma once

namespace torchoffload {

// Operators of our modes come here from now on, instead of by Python.
void install_interpreter_delegate();

// They come by Python again.
void remove_interpreter_delegate();

}  // namespace torchoffload
