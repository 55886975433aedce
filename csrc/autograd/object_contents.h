// Object contents: what is in the Python objects that can be reached from some others, and whether it has changed.
// Ownership:     returns new references; lists of contents hold what is in them.
// Thread safety: needs the GIL.
// Failures:      null or -1 with a Python exception set.
// Not handled:   objects that are no plain tuple, list or dict: a function of the caller says what is in these.
#pragma once

#include <torch/csrc/python_headers.h>

namespace torchoffload {

// Returns a list of tuples (object, contents) of the objects that can be reached from those in the list `roots`, each
// once; None if there are more than `most`. The contents are a list: the elements of a list, and the keys and values
// of a dict, one after the other. Tuples are followed. So is all that is in a list or dict. Tensors, types, modules of
// Python, texts and numbers are left out, and so is what is in the set `left_out`. For anything else `describe(object)`
// is called, which returns a tuple of a list of contents, or None, and a list of what to follow.
PyObject* object_contents(PyObject* roots, PyObject* left_out, PyObject* describe, size_t most);

// Returns a list of tuples (place, contents): for the object at each place of a list that object_contents() returned,
// what is in it now, if that is something else. Contents are compared by identity, texts and bytes by value.
PyObject* changed_contents(PyObject* before, PyObject* describe);

}  // namespace torchoffload
