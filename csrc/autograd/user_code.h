// Tells saves for code of the user's from saves for a formula of PyTorch's own.
// Ownership:     holds the code objects that it was given, for the life of the process.
// Thread safety: needs the GIL.
// Not handled:   a C++ torch::autograd::Function that is called past torch.ops, through bindings of its own: it looks
//                like an operator of PyTorch's.
//
// Note [Offsets that count]
// A span that moves alone comes back on a storage of its own, and its storage_offset counts from there. No formula of
// PyTorch's looks at an offset. Code of the user's may: as_strided takes one that counts from the storage's first byte,
// and reaches outside of the view that it is called on. Such code is the backward of a custom Function, of a compiled
// region or of an operator from torch.library, and the code that a checkpoint runs again. All of these save through a
// few Python functions, whose frame is the innermost one while the pack hook runs. A tensor that is saved for them
// moves with all of its storage, so that offset and storage come back as they were.
#pragma once

#include <Python.h>

namespace torchoffload {

// `code`: a code object. Saves by the function of that code are for code of the user's. False with a Python error set.
bool note_saving_code(PyObject* code);

// Is the present pack for code of the user's? Makes a frame object, so it is asked only if the answer counts.
bool saves_for_user_code();

}  // namespace torchoffload
