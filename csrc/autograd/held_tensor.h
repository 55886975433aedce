// HeldTensor: a saved tensor that a custom Function's backward gets, held once more than by its asker.
// Ownership:     held until nobody else holds it, as a later hook event finds, or until its graph task ends.
// Thread safety: every function, any thread.
// Not handled:   wrapper subclasses, which autograd copies in Python.
//
// Note [Gradients that were saved]
// A backward may return a tensor as it unpacked it. When nobody else holds a gradient, autograd makes it its own: it
// adds into it in place, or takes its storage for a leaf's .grad. Without hooks the graph or the program still holds
// that very tensor, so autograd copies. With hooks each unpack makes a new tensor, on bytes that others may get too; so
// it is held here for as long as stock would hold the saved one. Operators of PyTorch's own return no saved tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchoffload {

// `tensor`, a plain one, made anew such that it, and the copies that autograd makes of it, are held.
// Inside a graph task.
at::Tensor held(const at::Tensor& tensor);

// Drops the tensors that nobody else holds any more.
void drop_unheld();

}  // namespace torchoffload
