// Forward mode: the dispatch mode of a planned block's forward, without a Python call for most of its operators.
// Ownership:     the notes of a call are a capsule, which its mode holds, and which holds the call.
// Thread safety: needs the GIL. Different threads may dispatch to modes of their own.
// Failures:      null with a Python exception set: that of the operator, or of what notes it.
// Not handled:   operators that do more than to make new storages from their arguments, and those that the plan says
//                something about: a function of the caller notes these.
#pragma once

#include <torch/csrc/python_headers.h>

namespace torchoffload {

// How an operator is noted, as `classify` returns it.
enum class Noting : uint8_t {
  Never = 0,   // it returns views, and leaves no trace
  Simple = 1,  // it has a number, and writes only to storages that it makes
  Full = 2,    // by the function of the caller
};

// Returns the notes of a call of a block, for a mode's attribute `_notes`.
//   call       has the attributes `left_at`, which is None as long as forward does as planned; `operators`, a list to
//              which operators are appended; `made`, a set to which the addresses of new storages are added; `unnoted`,
//              a list that is empty unless there are writes whose versions were not noted yet; and `runs`, whose
//              attribute `open` is true while the block is computed again.
//   operators  a tuple: the operators as planned
//   special    bytes, one for each of these: not 0 where the plan says something about it
//   classify   classify(operator) returns a tuple of what to call in its place, and of its Noting as a number
//   note       note(call, operator, output, args, kwargs) does all that is to be done behind an operator
PyObject* forward_notes(PyObject* call, PyObject* operators, PyObject* special, PyObject* classify, PyObject* note);

// Returns a new reference to the method `__torch_dispatch__(self, func, types, args=(), kwargs=None)` of the mode.
PyObject* forward_dispatch();

}  // namespace torchoffload
