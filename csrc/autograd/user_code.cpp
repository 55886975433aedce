#include "autograd/user_code.h"

#include <algorithm>
#include <vector>

namespace torchoffload {

namespace {

// Leaked on purpose: the objects live until the process ends.
std::vector<const PyCodeObject*>& saving_codes() {
  static auto* const leaked = new std::vector<const PyCodeObject*>;
  return *leaked;
}

}  // namespace

bool note_saving_code(PyObject* code) {
  if (!PyCode_Check(code)) {
    PyErr_Format(PyExc_TypeError, "torchoffload: a code object is expected, not %.100s", Py_TYPE(code)->tp_name);
    return false;
  }
  saving_codes().push_back(reinterpret_cast<PyCodeObject*>(Py_NewRef(code)));
  return true;
}

bool saves_for_user_code() {
  PyFrameObject* const frame = PyEval_GetFrame();  // borrowed
  if (frame == nullptr) return false;
  PyCodeObject* const code = PyFrame_GetCode(frame);
  const std::vector<const PyCodeObject*>& known = saving_codes();
  const bool is_known = std::find(known.begin(), known.end(), code) != known.end();
  Py_DECREF(code);
  return is_known;
}

}  // namespace torchoffload
