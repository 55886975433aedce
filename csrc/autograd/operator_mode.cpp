#include "autograd/operator_mode.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/object_ptr.h>

#include <optional>
#include <utility>
#include <vector>

#include "autograd/operator_arguments.h"
#include "autograd/python_calls.h"

namespace torchoffload {

namespace {

using Modes = c10::impl::TorchDispatchModeTLS;

constexpr const char* kListener = "torchoffload.OperatorListener";

struct OperatorModeObject {
  PyObject_HEAD;
  OperatorMode* mode;
};

PyTypeObject* mode_type = nullptr;
uint64_t dispatched_by_python = 0;  // with the GIL

OperatorMode& mode_of(PyObject* self) { return *reinterpret_cast<OperatorModeObject*>(self)->mode; }

// The mode that a place on PyTorch's stack of modes holds; null if it is not one of ours.
OperatorMode* mode_at(int64_t place) {
  PyObject* const object = Modes::get_stack_at(place)->ptr(getPyInterpreter());
  return mode_type != nullptr && PyObject_TypeCheck(object, mode_type) ? &mode_of(object) : nullptr;
}

// Counts the opaque regions that a mode is in.
class InRegion {
 public:
  explicit InRegion(OperatorMode& mode) : mode_(mode) { ++mode_.opaque_depth; }
  InRegion(const InRegion&) = delete;
  InRegion& operator=(const InRegion&) = delete;
  ~InRegion() { --mode_.opaque_depth; }

 private:
  OperatorMode& mode_;
};

// Shows the call of `region` to the listeners of `modes`, the first one outermost, and returns its result.
template <typename Function>
PyObject* call_opaque(const char* name, c10::ArrayRef<OperatorMode*> modes, std::vector<at::Tensor> inputs,
                      const Function& region) {
  THPObjectPtr result;
  const auto run = [&](const auto& inner, size_t place) -> std::vector<at::Tensor> {
    if (place < modes.size()) {
      std::vector<at::Tensor> outputs;
      const InRegion in_region(*modes[place]);
      modes[place]->listener->opaque(name, inputs, [&] { return inner(inner, place + 1); });
      return result ? tensors_in(result.get()) : std::vector<at::Tensor>();
    }
    inputs.clear();
    result = or_throw(region());
    return tensors_in(result.get());
  };
  run(run, 0);
  return result.release();
}

// mode.on_other(func, types, args, kwargs): an opaque region, unless a class of Python says otherwise.
PyObject* on_other(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "on_other takes a function, types, arguments and keyword arguments");
    return nullptr;
  }
  PyObject* const kwargs = given[3] == Py_None ? nullptr : given[3];
  std::vector<at::Tensor> inputs = tensors_in(given[2]);
  if (kwargs != nullptr) add_tensors_in(kwargs, inputs);
  THPObjectPtr name(PyObject_Str(given[0]));
  const char* const text = name ? PyUnicode_AsUTF8(name.get()) : nullptr;
  if (text == nullptr) return nullptr;
  OperatorMode* const mode = &mode_of(self);
  return call_opaque(text, mode, std::move(inputs), [&] { return PyObject_Call(given[0], given[2], kwargs); });
  END_HANDLE_TH_ERRORS
}

// 1: every type is that of a tensor that is made of other tensors; 0: one is not, such as a fake tensor's, or a plain
// tensor's, which is named for the detach of a saved output alone; -1: a Python error is set.
int are_wrappers(PyObject* types) {
  THPObjectPtr sequence(PySequence_Fast(types, "__torch_dispatch__ takes a sequence of types"));
  if (!sequence) return -1;
  for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(sequence.get()); ++place) {
    PyObject* const type = PySequence_Fast_GET_ITEM(sequence.get(), place);
    if (PyObject_HasAttrString(type, "__tensor_flatten__") == 0) return 0;
  }
  return 1;
}

PyObject* torch_dispatch(PyObject* self, PyObject* const* given, Py_ssize_t count) REQUIRES(gil) {
  HANDLE_TH_ERRORS
  if (count < 2 || count > 4) {
    PyErr_SetString(PyExc_TypeError, "__torch_dispatch__ takes a function, types, arguments and keyword arguments");
    return nullptr;
  }
  ++dispatched_by_python;
  OperatorMode& mode = mode_of(self);
  THPObjectPtr args(count > 2 ? PySequence_Tuple(given[2]) : PyTuple_New(0));  // a tuple is returned as it is
  PyObject* const kwargs = count > 3 && given[3] != Py_None ? given[3] : nullptr;
  if (!args) return nullptr;
  if (kwargs != nullptr && !PyDict_Check(kwargs)) {
    PyErr_SetString(PyExc_TypeError, "__torch_dispatch__ takes its keyword arguments in a dict");
    return nullptr;
  }
  if (!mode.shows()) return PyObject_Call(given[0], args.get(), kwargs);
  if (const Py_ssize_t type_count = PyObject_Length(given[1]); type_count != 0) {
    const int is_made_of_others = type_count < 0 ? -1 : are_wrappers(given[1]);
    if (is_made_of_others < 0) return nullptr;
    if (is_made_of_others == 0) return PyObject_Call(given[0], args.get(), kwargs);
    Py_RETURN_NOTIMPLEMENTED;  // so PyTorch calls the __torch_dispatch__ of the types, with this mode on
  }
  const std::optional<c10::OperatorHandle> op = operator_of(given[0]);
  torch::jit::Stack stack;
  if (!op || !fill_stack(op->schema(), args.get(), kwargs, stack)) {
    if (PyErr_Occurred() != nullptr) return nullptr;
    return PyObject_CallMethod(self, "on_other", "OOOO", given[0], given[1], args.get(),
                               kwargs != nullptr ? kwargs : Py_None);
  }
  const std::shared_ptr<OperatorListener> listener = mode.listener;
  {
    const WithoutGil without_gil;
    listener->call(*op, &stack);
  }
  return results_in(std::move(stack));
  END_HANDLE_TH_ERRORS
}

PyObject* mode_begin(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  mode_of(self).thread = std::this_thread::get_id();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* mode_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  HANDLE_TH_ERRORS
  if (PyTuple_GET_SIZE(args) != 1) {
    PyErr_SetString(PyExc_TypeError, "torchoffload: a mode takes the capsule of one listener");
    return nullptr;
  }
  const std::shared_ptr<OperatorListener>& listener = listener_of(PyTuple_GET_ITEM(args, 0));
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  reinterpret_cast<OperatorModeObject*>(self.get())->mode = new OperatorMode;
  mode_of(self.get()).listener = listener;
  return self.release();
  END_HANDLE_TH_ERRORS
}

void mode_dealloc(PyObject* self) {
  delete reinterpret_cast<OperatorModeObject*>(self)->mode;
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef mode_methods[] = {
    {"__torch_dispatch__", as_method(torch_dispatch), METH_FASTCALL, "Shows an operator to the listener."},
    {"on_other", as_method(on_other), METH_FASTCALL, "Shows an opaque region to the listener."},
    {"_begin", mode_begin, METH_NOARGS, "The mode shows the operators of this thread from now on."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot mode_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(mode_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(mode_dealloc)},
    {Py_tp_methods, mode_methods},
    {Py_tp_doc, const_cast<char*>("OperatorMode(listener): the base of a mode that shows its operators.")},
    {0, nullptr},
};
PyType_Spec mode_spec = {"torchoffload._C.OperatorMode", sizeof(OperatorModeObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, mode_slots};

// The modes of ours that are on and shown this thread's operators, the innermost first.
std::vector<OperatorMode*> shown_modes() {
  std::vector<OperatorMode*> modes;
  for (int64_t place = Modes::stack_len(); place-- > 0;) {
    OperatorMode* const mode = mode_at(place);
    if (mode != nullptr && mode->opaque_depth == 0 && mode->thread == std::this_thread::get_id()) modes.push_back(mode);
  }
  return modes;
}

// `closure` is (the function, its name).
PyObject* call_method(PyObject* closure, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  PyObject* const function = PyTuple_GET_ITEM(closure, 0);
  const auto call = [&] { return PyObject_Vectorcall(function, given, static_cast<size_t>(count), names); };
  if (Modes::stack_len() == 0) return call();
  const std::vector<OperatorMode*> modes = shown_modes();
  if (modes.empty()) return call();
  const Py_ssize_t all = count + (names != nullptr ? PyTuple_GET_SIZE(names) : 0);
  std::vector<at::Tensor> inputs;
  for (Py_ssize_t place = 0; place < all; ++place) add_tensors_in(given[place], inputs);
  return call_opaque(PyUnicode_AsUTF8(PyTuple_GET_ITEM(closure, 1)), modes, std::move(inputs), call);
  END_HANDLE_TH_ERRORS
}

}  // namespace

bool OperatorMode::shows() const {
  using Key = c10::impl::TorchDispatchModeKey;
  if (opaque_depth != 0 || thread != std::this_thread::get_id()) return false;
  if (Modes::stack_len() == 0) return true;
  return !Modes::get_mode(Key::FAKE) && !Modes::get_mode(Key::PROXY) && !Modes::get_mode(Key::FUNCTIONAL);
}

bool add_operator_mode(PyObject* module) {
  mode_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&mode_spec));
  return mode_type != nullptr &&
         PyModule_AddObjectRef(module, "OperatorMode", reinterpret_cast<PyObject*>(mode_type)) == 0;
}

PyObject* to_python(std::shared_ptr<OperatorListener> listener) {
  using Shared = std::shared_ptr<OperatorListener>;
  auto shared = std::make_unique<Shared>(std::move(listener));
  PyObject* const capsule = PyCapsule_New(shared.get(), kListener, [](PyObject* object) {
    delete static_cast<Shared*>(PyCapsule_GetPointer(object, kListener));
  });
  if (capsule != nullptr) static_cast<void>(shared.release());
  return capsule;
}

const std::shared_ptr<OperatorListener>& listener_of(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kListener) == 0) {
    PyErr_SetString(PyExc_TypeError, "torchoffload: a mode takes the capsule of one listener");
    throw python_error();
  }
  return *static_cast<std::shared_ptr<OperatorListener>*>(PyCapsule_GetPointer(capsule, kListener));
}

uint64_t operators_by_python() { return dispatched_by_python; }

OperatorMode* mode_on_top() {
  const int64_t length = Modes::stack_len();
  return length == 0 ? nullptr : mode_at(length - 1);
}

PyObject* opaque_method(PyObject* function, const char* name) {
  static PyMethodDef definition{"opaque", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_method)),
                                METH_FASTCALL | METH_KEYWORDS, "Calls a method whose operators no listener is shown."};
  THPObjectPtr closure(Py_BuildValue("(Os)", function, name));
  THPObjectPtr bound(closure ? PyCFunction_New(&definition, closure.get()) : nullptr);
  return bound ? PyInstanceMethod_New(bound.get()) : nullptr;
}

}  // namespace torchoffload
