// hooks: the two C types that Python sees, Context and the handle that pack returns, and the hook functions.
// Ownership:     a handle owns its SavedTensor; its dealloc is the only release.
// Thread safety: needs the GIL. Pack and unpack are builtin METH_O functions.
#pragma once

#include <Python.h>

#include <memory>

#include "autograd/context.h"
#include "system/gil.h"

namespace torchoffload {

class RecordedCall;

// Makes the types and adds Context, unpack, noop_pack and noop_unpack to the module. `parameter_type`:
// torch.nn.Parameter. Returns false with a Python error set.
bool add_hooks(PyObject* module, PyObject* parameter_type);

// The Context that Python holds as `object`; null with a Python error set if it holds something else.
Context* context_of(PyObject* object);

// The object of the context whose hook autograd calls for the next tensor that the calling thread saves; a new
// reference. Null if there is no hook, or it is another's.
PyObject* top_context() REQUIRES(gil);

// Gives the warnings that came up in the context of that object. Runs Python, so only while no operation is open. Returns
// false with an error set if a warning became one.
bool give_warnings_of(PyObject* context);

// Saves a tensor by a context, or keeps it if that is null. Inside of an operation.
std::unique_ptr<Saved> pack_as_is(Context* context, PyObject* object, const c10::VariableVersion* wrapper)
    REQUIRES(gil);

// A new reference to a pack hook that has `call` save each tensor; null with a Python error set.
PyObject* pack_hook_of(std::shared_ptr<RecordedCall> call);

// The arguments of Context.__init__, parsed in bindings.cpp. Throws if they cannot be parsed.
struct ContextArguments {
  ContextOptions options;
  PyObject* warn = nullptr;  // new reference
};
ContextArguments parse_context_arguments(PyObject* args, PyObject* kwargs);

}  // namespace torchoffload
