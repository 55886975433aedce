#include "autograd/forward_mode.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

#include "autograd/storage_addresses.h"

namespace torchoffload {

namespace {

constexpr const char* kCapsule = "torchoffload.forward_notes";

struct Notes {
  THPObjectPtr call, operators, special, classify, note;
  THPObjectPtr noted, made, unnoted, runs;  // attributes of the call
};

// What is known of an operator, and what is called in its place.
struct OperatorTraits {
  PyObject* target = nullptr;
  Noting noting = Noting::Full;
};

// By the operator. It is held, so that its address stays its own.
std::unordered_map<PyObject*, OperatorTraits>& known_traits() {
  static auto* const traits = new std::unordered_map<PyObject*, OperatorTraits>;
  return *traits;
}

PyObject* interned(PyObject*& known, const char* text) {
  if (known == nullptr) known = PyUnicode_InternFromString(text);
  return known;
}

PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}

void destroy(PyObject* capsule) { delete static_cast<Notes*>(PyCapsule_GetPointer(capsule, kCapsule)); }

// Null with an exception set.
const OperatorTraits* traits_of(PyObject* function, Notes& notes) {
  auto& known = known_traits();
  if (const auto found = known.find(function); found != known.end()) return &found->second;
  THPObjectPtr told(PyObject_CallFunctionObjArgs(notes.classify.get(), function, nullptr));
  if (!told) return nullptr;
  PyObject* target = nullptr;
  int noting = 0;
  if (!PyArg_ParseTuple(told.get(), "Oi", &target, &noting)) return nullptr;
  const auto [place, is_new] =
      known.emplace(function, OperatorTraits{target, static_cast<Noting>(std::clamp(noting, 0, 2))});
  if (is_new) {
    Py_INCREF(function);
    Py_INCREF(target);
  }
  return &place->second;
}

// While it is alive, torch.compile looks at no frame, as in PyTorch's own modes: what operators and notes run in Python
// is not compiled, also where the mode is called beneath a frame that torch.compile has left to the interpreter.
class WithoutCompiling {
 public:
  WithoutCompiling() : before_(set_callback(Py_None)) {}
  WithoutCompiling(const WithoutCompiling&) = delete;
  WithoutCompiling& operator=(const WithoutCompiling&) = delete;
  ~WithoutCompiling() {
    if (!before_) return;
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    THPObjectPtr replaced(set_callback(before_.get()));
    if (!replaced) PyErr_WriteUnraisable(nullptr);
    PyErr_Restore(type, value, traceback);
  }

  // False: an exception is set.
  explicit operator bool() { return before_.get() != nullptr; }

 private:
  // Returns the callback that there was before.
  static PyObject* set_callback(PyObject* callback) {
    static PyObject* function = nullptr;
    if (function == nullptr) {
      THPObjectPtr module(PyImport_ImportModule("torch._C._dynamo.eval_frame"));
      if (!module) return nullptr;
      function = PyObject_GetAttrString(module.get(), "set_eval_frame");
      if (function == nullptr) return nullptr;
    }
    return PyObject_CallFunctionObjArgs(function, callback, nullptr);
  }

  THPObjectPtr before_;
};

// Whether forward is inside of a recomputation of its own block: it asked for a gradient. -1: an exception is set.
int is_computed_again(Notes& notes) {
  static PyObject* name = nullptr;
  THPObjectPtr open(PyObject_GetAttr(notes.runs.get(), interned(name, "open")));
  return open ? PyObject_IsTrue(open.get()) : -1;
}

// 1: noted; 0: the function of the caller has to do it; -1: an exception is set.
int note_simple(Notes& notes, PyObject* function, PyObject* output, PyObject* args, PyObject* kwargs) {
  static PyObject* name = nullptr;
  THPObjectPtr left_at(PyObject_GetAttr(notes.call.get(), interned(name, "left_at")));
  if (!left_at) return -1;
  const Py_ssize_t number = PyList_GET_SIZE(notes.noted.get());
  const bool is_planned = left_at.get() == Py_None && number < PyTuple_GET_SIZE(notes.operators.get()) &&
                          number < PyBytes_GET_SIZE(notes.special.get()) &&
                          PyTuple_GET_ITEM(notes.operators.get(), number) == function;
  if (!is_planned || PyBytes_AS_STRING(notes.special.get())[number] != 0) return 0;
  if (PyList_GET_SIZE(notes.unnoted.get()) != 0) return 0;
  std::vector<void*> made, given;
  if (find_storages(output, made) == Found::Unknown || find_storages(args, given) == Found::Unknown) return 0;
  if (kwargs != nullptr && find_storages(kwargs, given) == Found::Unknown) return 0;
  for (void* each : made) {
    if (std::ranges::find(given, each) != given.end()) continue;
    THPObjectPtr address(PyLong_FromVoidPtr(each));
    if (!address || PySet_Add(notes.made.get(), address.get()) != 0) return -1;
  }
  return PyList_Append(notes.noted.get(), function) == 0 ? 1 : -1;
}

PyObject* dispatch(PyObject* /*module*/, PyObject* const* given, Py_ssize_t count) try {
  static PyObject* name = nullptr;
  if (count < 3 || count > 5) {
    PyErr_SetString(PyExc_TypeError, "__torch_dispatch__ takes a function, types, arguments and keyword arguments");
    return nullptr;
  }
  PyObject* const function = given[1];
  THPObjectPtr args(count > 3 ? PySequence_Tuple(given[3]) : PyTuple_New(0));  // a tuple is returned as it is
  PyObject* const kwargs = count > 4 && given[4] != Py_None ? given[4] : nullptr;
  if (kwargs != nullptr && !PyDict_Check(kwargs)) {
    PyErr_SetString(PyExc_TypeError, "__torch_dispatch__ takes its keyword arguments in a dict");
    return nullptr;
  }
  THPObjectPtr capsule(PyObject_GetAttr(given[0], interned(name, "_notes")));
  if (!args || !capsule) return nullptr;
  auto* notes = static_cast<Notes*>(PyCapsule_GetPointer(capsule.get(), kCapsule));
  if (notes == nullptr) return nullptr;
  WithoutCompiling compiles_nothing;
  if (!compiles_nothing) return nullptr;
  const OperatorTraits* traits = traits_of(function, *notes);
  if (traits == nullptr) return nullptr;
  THPObjectPtr output(PyObject_Call(traits->target, args.get(), kwargs));
  if (!output || traits->noting == Noting::Never) return output.release();
  if (const int is_again = is_computed_again(*notes); is_again != 0) return is_again < 0 ? nullptr : output.release();
  if (traits->noting == Noting::Simple) {
    const int noted = note_simple(*notes, function, output.get(), args.get(), kwargs);
    if (noted != 0) return noted < 0 ? nullptr : output.release();
  }
  THPObjectPtr keywords(kwargs != nullptr ? new_reference(kwargs) : PyDict_New());
  if (!keywords) return nullptr;
  THPObjectPtr done(PyObject_CallFunctionObjArgs(notes->note.get(), notes->call.get(), function, output.get(),
                                                 args.get(), keywords.get(), nullptr));
  return done ? output.release() : nullptr;
} catch (...) {  // without what HANDLE_TH_ERRORS does for warnings, which takes time
  torch::translate_exception_to_python(std::current_exception());
  return nullptr;
}

}  // namespace

PyObject* forward_notes(PyObject* call, PyObject* operators, PyObject* special, PyObject* classify, PyObject* note) {
  auto notes = std::make_unique<Notes>();
  notes->noted = PyObject_GetAttrString(call, "operators");
  notes->made = PyObject_GetAttrString(call, "made");
  notes->unnoted = PyObject_GetAttrString(call, "unnoted");
  notes->runs = PyObject_GetAttrString(call, "runs");
  if (!notes->noted || !notes->made || !notes->unnoted || !notes->runs) return nullptr;
  if (!PyList_Check(notes->noted.get()) || !PySet_Check(notes->made.get()) || !PyList_Check(notes->unnoted.get()) ||
      !PyTuple_Check(operators) || !PyBytes_Check(special)) {
    PyErr_SetString(PyExc_TypeError, "forward_notes: an argument or an attribute of the call has another type");
    return nullptr;
  }
  notes->call = new_reference(call);
  notes->operators = new_reference(operators);
  notes->special = new_reference(special);
  notes->classify = new_reference(classify);
  notes->note = new_reference(note);
  PyObject* capsule = PyCapsule_New(notes.get(), kCapsule, destroy);
  if (capsule != nullptr) static_cast<void>(notes.release());
  return capsule;
}

PyObject* forward_dispatch() {
  static PyMethodDef definition{"__torch_dispatch__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(dispatch)),
                                METH_FASTCALL, "Calls an operator and notes it."};
  THPObjectPtr function(PyCFunction_New(&definition, nullptr));
  return function ? PyInstanceMethod_New(function.get()) : nullptr;
}

}  // namespace torchoffload
