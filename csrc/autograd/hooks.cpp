#include "autograd/hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <new>
#include <optional>
#include <utility>

#include "autograd/graph_trees.h"
#include "autograd/held_tensor.h"
#include "autograd/recorded_call.h"
#include "autograd/saved_wrapper.h"
#include "engine/operation.h"
#include "engine/profiler_range.h"
#include "engine/thread_state.h"
#include "system/host_wait.h"

namespace torchoffload {

namespace {

PyTypeObject* parameter_type = nullptr;  // torch.nn.Parameter; borrowed for the life of the process

struct ContextObject {
  PyObject_HEAD Context* context;
  PyObject* warn;
};

struct HandleObject {
  PyObject_HEAD Saved* saved;
};

// ---- handle ----

void handle_dealloc(PyObject* self) {
  delete reinterpret_cast<HandleObject*>(self)->saved;
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
    {Py_tp_doc, const_cast<char*>("What pack returned for one saved tensor. Opaque.")},
    {0, nullptr},
};
PyType_Spec handle_spec = {"torchoffload._C.Handle", sizeof(HandleObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots};
PyTypeObject* handle_type = nullptr;

// ---- warnings ----

// Runs Python, so only while no operation is open. Returns false with an error set if a warning became one.
bool give_warnings(const ContextObject& object) {
  for (const std::string& text : object.context->take_warnings()) {
    PyObject* const result = PyObject_CallFunction(object.warn, "s", text.c_str());
    if (result == nullptr) return false;
    Py_DECREF(result);
  }
  return true;
}

// ---- pack and unpack ----

Context::TypeKind kind_of(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  if (type == reinterpret_cast<PyTypeObject*>(THPVariableClass)) return Context::TypeKind::Tensor;
  if (PyType_IsSubtype(type, parameter_type) != 0) return Context::TypeKind::Parameter;
  // A Parameter made of a subclass keeps the subclass's type, and is marked.
  THPObjectPtr mark(PyObject_GetAttrString(object, "_is_param"));
  if (!mark) PyErr_Clear();
  return mark && mark.get() == Py_True ? Context::TypeKind::Parameter : Context::TypeKind::Subclass;
}

bool is_view_of_parameter(const at::Tensor& tensor) {
  if (!tensor.is_view()) return false;
  PyObject* const base = THPVariable_Wrap(tensor._base());
  if (base == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool is_parameter = kind_of(base) == Context::TypeKind::Parameter;
  Py_DECREF(base);
  return is_parameter;
}

// Code that unwraps a wrapper-subclass Parameter saves the inner tensors directly, or inside of a detached copy. So
// they are noted as parameters, too.
void note_inner_parameters(PyObject* object, const at::Tensor& tensor) {
  if (THPVariable_CheckExact(object) || is_storage_of_parameter(tensor) || !SavedWrapper::is_wrapper(object)) return;
  SavedWrapper::visit_inner_tensors(object, note_parameter);
}

// `wrapper`: the version of the outermost wrapper that the object is inside of; see Note [Versions of inner tensors].
std::unique_ptr<Saved> pack(Context& context, PyObject* object, const c10::VariableVersion* wrapper = nullptr)
    REQUIRES(gil) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const Context::TypeKind kind = kind_of(object);
  const bool is_view = is_view_of_parameter(tensor);
  if (kind == Context::TypeKind::Subclass && !is_view && SavedWrapper::is_wrapper(object)) {
    const c10::VariableVersion outermost =
        wrapper != nullptr ? *wrapper : torch::autograd::impl::version_counter(tensor);
    return std::make_unique<SavedWrapper>(
        object, [&](PyObject* inner) REQUIRES(gil) { return pack(context, inner, &outermost); });
  }
  if (kind == Context::TypeKind::Parameter || is_view) note_inner_parameters(object, tensor);
  return context.pack(tensor, kind, is_view, wrapper);
}

bool check_tensor(PyObject* object, const char* function) {
  if (THPVariable_Check(object)) return true;
  PyErr_Format(PyExc_TypeError, "torchoffload: %s expects a torch.Tensor, not %.100s", function,
               Py_TYPE(object)->tp_name);
  return false;
}

// A new handle that owns the Saved of `save`. `context`: one that may have warnings to give; may be null.
template <typename Save>
PyObject* handle_of(PyObject* object, PyObject* context, const Save& save) REQUIRES(gil) {
  if (!check_tensor(object, "pack") || !look_for_graph_trees()) return nullptr;
  const ProfilerRange range("torchoffload::pack");
  // The handle is made first: its allocation may run the collector, and must not fail once there is a record.
  auto* const handle = PyObject_New(HandleObject, handle_type);
  if (handle == nullptr) return nullptr;
  handle->saved = nullptr;
  THPObjectPtr owned(reinterpret_cast<PyObject*>(handle));
  {
    const Operation operation;
    drop_unheld();
    handle->saved = save().release();
  }
  if (context != nullptr && !give_warnings(*reinterpret_cast<ContextObject*>(context))) return nullptr;
  return owned.release();
}

PyObject* context_pack(PyObject* self, PyObject* object) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  return handle_of(object, self,
                   [&]() REQUIRES(gil) { return pack(*reinterpret_cast<ContextObject*>(self)->context, object); });
  END_HANDLE_TH_ERRORS
}

constexpr const char* kRecordedCall = "torchoffload.RecordedCall";

RecordedCall* call_of(PyObject* capsule) {
  auto* const shared = static_cast<std::shared_ptr<RecordedCall>*>(PyCapsule_GetPointer(capsule, kRecordedCall));
  return shared != nullptr ? shared->get() : nullptr;
}

PyObject* recorded_call_pack(PyObject* capsule, PyObject* object) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  RecordedCall* const call = call_of(capsule);
  if (call == nullptr) return nullptr;
  return handle_of(object, call->context(), [&]() REQUIRES(gil) { return call->pack(object); });
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* object) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(object) != handle_type) {
    PyErr_Format(PyExc_TypeError, "torchoffload: unpack expects what pack returned, not %.100s",
                 Py_TYPE(object)->tp_name);
    return nullptr;
  }
  if (!look_for_graph_trees()) return nullptr;
  const ProfilerRange range("torchoffload::unpack");
  // The caller's reference is not enough: a backward on another thread may release it while this one waits without the
  // GIL.
  const THPObjectPtr held_meanwhile(Py_NewRef(object));
  // The saved tensor was no inference tensor, and must not become one because it is read in inference mode.
  std::optional<c10::InferenceMode> normal_mode;
  if (c10::InferenceMode::is_enabled()) normal_mode.emplace(/*enabled=*/false);
  at::Tensor tensor;
  for (bool is_done = false; !is_done;) {
    try {
      reinterpret_cast<HandleObject*>(object)->saved->prepare();
      const Operation operation;
      tensor = reinterpret_cast<HandleObject*>(object)->saved->unpack(Versions::Check);
      Engine::flush_pending();  // after unpack: a record that is asked for while it is pending gives its source
      is_done = true;
    } catch (const WaitAbandoned&) {  // if the handler of Ctrl-C raises nothing, the wait begins anew
      if (PyErr_CheckSignals() != 0) return nullptr;
    }
  }
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

PyObject* noop_pack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!check_tensor(object, "pack")) return nullptr;
  auto* const handle = PyObject_New(HandleObject, handle_type);
  if (handle == nullptr) return nullptr;
  handle->saved = nullptr;
  THPObjectPtr owned(reinterpret_cast<PyObject*>(handle));
  const at::Tensor& tensor = THPVariable_Unpack(object);
  handle->saved = new SavedTensor(tensor);
  return owned.release();
  END_HANDLE_TH_ERRORS
}

PyObject* pack_made(PyObject*, PyObject* args) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  PyObject* pack = nullptr;
  PyObject* tensor = nullptr;
  if (PyArg_ParseTuple(args, "OO:pack_made", &pack, &tensor) == 0) return nullptr;
  const PacksMade packs_made;
  THPObjectPtr handle(PyObject_CallOneArg(pack, tensor));
  if (!handle) return nullptr;
  const Operation operation;
  Engine::flush_pending();
  return handle.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef hook_functions[] = {
    {"unpack", unpack, METH_O, "unpack(handle) -> Tensor: the unpack hook of every context."},
    {"pack_made", pack_made, METH_VARARGS, "pack_made(pack, tensor) -> handle: packs what an operator has returned."},
    {"noop_pack", noop_pack, METH_O, "noop_pack(tensor) -> handle: keeps the tensor, detached."},
    {nullptr, nullptr, 0, nullptr},
};

// ---- context ----

PyObject* context_enter(PyObject* self, PyObject*) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  reinterpret_cast<ContextObject*>(self)->context->enter();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* context_exit(PyObject* self, PyObject*) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  reinterpret_cast<ContextObject*>(self)->context->exit();
  if (!give_warnings(*reinterpret_cast<ContextObject*>(self))) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* context_exempt(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!check_tensor(object, "exempt")) return nullptr;
  reinterpret_cast<ContextObject*>(self)->context->exempt(THPVariable_Unpack(object));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* context_admit(PyObject* self, PyObject* object) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  if (!check_tensor(object, "admit")) return nullptr;
  reinterpret_cast<ContextObject*>(self)->context->admit(THPVariable_Unpack(object));
  if (!give_warnings(*reinterpret_cast<ContextObject*>(self))) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* context_set_module(PyObject* self, PyObject* object) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  const unsigned long number = PyLong_AsUnsignedLong(object);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyLong_FromUnsignedLong(
      reinterpret_cast<ContextObject*>(self)->context->set_module(static_cast<uint32_t>(number)));
  END_HANDLE_TH_ERRORS
}

PyObject* context_forget_modules(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  reinterpret_cast<ContextObject*>(self)->context->forget_modules();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* context_restrict(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  double fraction = 1;
  int only_inputs = 0;
  if (PyArg_ParseTuple(args, "dp", &fraction, &only_inputs) == 0) return nullptr;
  reinterpret_cast<ContextObject*>(self)->context->restrict(fraction, only_inputs != 0);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* context_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  ContextArguments arguments = parse_context_arguments(args, kwargs);
  THPObjectPtr warn(arguments.warn);
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  auto& object = *reinterpret_cast<ContextObject*>(self.get());
  object.context = new Context(std::move(arguments.options));
  object.warn = warn.release();
  return self.release();
  END_HANDLE_TH_ERRORS
}

void context_dealloc(PyObject* self) {
  auto& object = *reinterpret_cast<ContextObject*>(self);
  delete object.context;
  Py_XDECREF(object.warn);
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef context_methods[] = {
    {"pack", context_pack, METH_O, "pack(tensor) -> handle: the pack hook."},
    {"enter", context_enter, METH_NOARGS, "Opens the context on this thread."},
    {"exit", context_exit, METH_NOARGS, "Closes it: what is pending is enqueued."},
    {"exempt", context_exempt, METH_O, "exempt(tensor): never move this storage under this context."},
    {"admit", context_admit, METH_O, "admit(tensor): of this storage what is saved moves, under only_inputs."},
    {"set_module", context_set_module, METH_O, "set_module(number) -> the one before: what is saved counts for it."},
    {"forget_modules", context_forget_modules, METH_NOARGS, "Counts begin anew."},
    {"restrict", context_restrict, METH_VARARGS, "restrict(fraction, only_inputs): see offload_modules."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot context_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(context_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(context_dealloc)},
    {Py_tp_methods, context_methods},
    {Py_tp_doc, const_cast<char*>("One offloading context: options, and the tapes it has open.")},
    {0, nullptr},
};
PyType_Spec context_spec = {"torchoffload._C.Context", sizeof(ContextObject), 0, Py_TPFLAGS_DEFAULT, context_slots};

PyTypeObject* context_type = nullptr;

}  // namespace

Context* context_of(PyObject* object) {
  if (Py_TYPE(object) == context_type) return reinterpret_cast<ContextObject*>(object)->context;
  PyErr_Format(PyExc_TypeError, "torchoffload: a Context is expected, not %.100s", Py_TYPE(object)->tp_name);
  return nullptr;
}

PyObject* top_context() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  if (!hooks) return nullptr;
  PyObject* const pack_hook = hooks->first.ptr(getPyInterpreter());
  if (PyCFunction_Check(pack_hook) == 0 || PyCFunction_GET_FUNCTION(pack_hook) != context_pack) return nullptr;
  return Py_NewRef(PyCFunction_GET_SELF(pack_hook));
}

bool give_warnings_of(PyObject* context) { return give_warnings(*reinterpret_cast<ContextObject*>(context)); }

std::unique_ptr<Saved> pack_as_is(Context* context, PyObject* object, const c10::VariableVersion* wrapper) {
  if (context != nullptr) return pack(*context, object, wrapper);
  return std::make_unique<SavedTensor>(THPVariable_Unpack(object));
}

PyObject* pack_hook_of(std::shared_ptr<RecordedCall> call) {
  static PyMethodDef definition{"pack", recorded_call_pack, METH_O, "pack(tensor) -> handle: the pack hook of a call."};
  auto shared = std::make_unique<std::shared_ptr<RecordedCall>>(std::move(call));
  THPObjectPtr capsule(PyCapsule_New(shared.get(), kRecordedCall, [](PyObject* self) {
    delete static_cast<std::shared_ptr<RecordedCall>*>(PyCapsule_GetPointer(self, kRecordedCall));
  }));
  if (!capsule) return nullptr;
  static_cast<void>(shared.release());
  return PyCFunction_New(&definition, capsule.get());
}

bool add_hooks(PyObject* module, PyObject* parameter) {
  parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  handle_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&handle_spec));
  context_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&context_spec));
  if (handle_type == nullptr || context_type == nullptr) return false;
  return PyModule_AddFunctions(module, hook_functions) == 0 &&
         PyModule_AddObjectRef(module, "Handle", reinterpret_cast<PyObject*>(handle_type)) == 0 &&
         PyModule_AddObjectRef(module, "Context", reinterpret_cast<PyObject*>(context_type)) == 0;
}

}  // namespace torchoffload
