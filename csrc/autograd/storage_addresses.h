// Storage addresses: which storages the arguments or results of an operator have, without a Python call for each.
// Ownership:     returns a new reference.
// Thread safety: needs the GIL.
// Failures:      null with a Python exception set.
// Not handled:   tensors of other classes, and containers other than tuples, lists and dicts: the caller looks into
//                these itself, as PyTorch's pytree does.
#pragma once

#include <torch/csrc/python_headers.h>

#include <vector>

namespace torchoffload {

// Whether all tensors of a nest were found; Unknown: something in it may hold tensors that were not.
enum class Found : uint8_t { All, Unknown };

// Appends the addresses of the storages of all tensors in a nest of tuples, lists and dicts.
Found find_storages(PyObject* value, std::vector<void*>& addresses);

// Returns a set of the addresses of the storages (`UntypedStorage._cdata`) of all tensors in a nest of tuples, lists
// and dicts, or None if something in it is neither a plain tensor, nor such a container, nor a value without tensors.
PyObject* storage_addresses(PyObject* value);

}  // namespace torchoffload
