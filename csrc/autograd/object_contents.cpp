#include "autograd/object_contents.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <deque>
#include <unordered_set>

namespace torchoffload {

namespace {

bool is_left_out(PyObject* object) {
  return object == Py_None || PyUnicode_Check(object) || PyBytes_Check(object) || PyLong_Check(object) ||
         PyFloat_Check(object) || PyType_Check(object) || PyModule_Check(object) || THPVariable_Check(object);
}

bool is_plain(PyObject* object) { return PyList_CheckExact(object) || PyDict_CheckExact(object); }

// The contents of a plain list or dict.
PyObject* plain_contents(PyObject* object) {
  if (PyList_CheckExact(object)) return PyList_GetSlice(object, 0, PyList_GET_SIZE(object));
  // A list that is made may run finalizers, which may change the dict: it is made before the dict is looked at.
  THPObjectPtr contents(PyList_New(0));
  if (!contents) return nullptr;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value);) {
    if (PyList_Append(contents.get(), key) != 0 || PyList_Append(contents.get(), value) != 0) return nullptr;
  }
  return contents.release();
}

bool is_same(PyObject* one, PyObject* other) {
  if (one == other) return true;
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  if (PyUnicode_CheckExact(one)) return PyUnicode_Compare(one, other) == 0;
  if (!PyBytes_CheckExact(one)) return false;
  return PyBytes_GET_SIZE(one) == PyBytes_GET_SIZE(other) &&
         memcmp(PyBytes_AS_STRING(one), PyBytes_AS_STRING(other), static_cast<size_t>(PyBytes_GET_SIZE(one))) == 0;
}

bool are_same(PyObject* one, PyObject* other) {
  const Py_ssize_t count = PyList_GET_SIZE(one);
  if (count != PyList_GET_SIZE(other)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_same(PyList_GET_ITEM(one, i), PyList_GET_ITEM(other, i))) return false;
  }
  return true;
}

// Are these the contents of a plain list or dict? Makes no list of what is in it now.
bool has_contents(PyObject* object, PyObject* contents) {
  if (PyList_CheckExact(object)) return are_same(object, contents);
  if (2 * PyDict_Size(object) != PyList_GET_SIZE(contents)) return false;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value); place += 2) {
    const bool is_pair =
        is_same(key, PyList_GET_ITEM(contents, place)) && is_same(value, PyList_GET_ITEM(contents, place + 1));
    if (!is_pair) return false;
  }
  return true;
}

// What `describe` says of an object: its contents or None, and what to follow.
struct Described {
  THPObjectPtr both;
  PyObject* contents = nullptr;  // borrowed from `both`
  PyObject* follow = nullptr;
};

Described described(PyObject* object, PyObject* describe) {
  Described found{THPObjectPtr(PyObject_CallOneArg(describe, object))};
  if (found.both && !PyArg_ParseTuple(found.both.get(), "OO!", &found.contents, &PyList_Type, &found.follow))
    found.both = nullptr;
  if (found.both && found.contents != Py_None && !PyList_Check(found.contents)) {
    PyErr_SetString(PyExc_TypeError, "contents must be a list or None");
    found.both = nullptr;
  }
  return found;
}

// Goes through what can be reached, breadth first. References are held, since `describe` may run any code.
class Reaching {
 public:
  Reaching(PyObject* left_out, PyObject* describe, size_t most)
      : left_out_(left_out), describe_(describe), most_(most), found_(PyList_New(0)) {}

  // Returns whether all went well.
  bool follow(PyObject* roots) {
    if (!found_ || !add_all(roots)) return false;
    while (!left_.empty() && !has_too_many()) {
      THPObjectPtr object = std::move(left_.front());
      left_.pop_front();
      if (!look_into(object.get())) return false;
    }
    return true;
  }

  bool has_too_many() const { return seen_.size() > most_; }

  PyObject* take() { return found_.release(); }

 private:
  bool add(PyObject* object) {
    if (is_left_out(object) || seen_.contains(object)) return true;
    // What cannot be hashed is in no set.
    const int is_known = PyTuple_Check(object) || is_plain(object) ? 0 : contains(object);
    if (is_known != 0) return is_known > 0;
    seen_.insert(object);
    left_.emplace_back(Py_NewRef(object));
    return true;
  }

  int contains(PyObject* object) const {
    const int is_known = PySet_Contains(left_out_, object);
    if (is_known >= 0) return is_known;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
  }

  bool add_all(PyObject* sequence) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
      // What it is compared with may run any code, which may take it out of the sequence.
      THPObjectPtr held_meanwhile(Py_NewRef(PySequence_Fast_GET_ITEM(sequence, i)));
      if (!add(held_meanwhile.get())) return false;
    }
    return true;
  }

  bool note(PyObject* object, PyObject* contents) {
    THPObjectPtr entry(PyTuple_Pack(2, object, contents));
    return entry && PyList_Append(found_.get(), entry.get()) == 0;
  }

  bool look_into(PyObject* object) {
    held_.emplace_back(Py_NewRef(object));  // so that nothing else gets its address
    if (PyTuple_Check(object)) return add_all(object);
    if (is_plain(object)) {
      THPObjectPtr contents(plain_contents(object));
      return contents && note(object, contents.get()) && add_all(contents.get());
    }
    const Described what = described(object, describe_);
    if (!what.both || !add_all(what.follow)) return false;
    return what.contents == Py_None || note(object, what.contents);
  }

  PyObject* left_out_;
  PyObject* describe_;
  size_t most_;
  THPObjectPtr found_;
  std::deque<THPObjectPtr> left_;
  std::vector<THPObjectPtr> held_;
  std::unordered_set<PyObject*> seen_;
};

}  // namespace

PyObject* object_contents(PyObject* roots, PyObject* left_out, PyObject* describe, size_t most) {
  Reaching reaching(left_out, describe, most);
  if (!reaching.follow(roots)) return nullptr;
  if (reaching.has_too_many()) Py_RETURN_NONE;
  return reaching.take();
}

PyObject* changed_contents(PyObject* before, PyObject* describe) {
  THPObjectPtr changed(PyList_New(0));
  if (!changed) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); ++i) {
    PyObject *object = nullptr, *contents = nullptr;
    THPObjectPtr entry(Py_NewRef(PyList_GET_ITEM(before, i)));
    if (!PyArg_ParseTuple(entry.get(), "OO!", &object, &PyList_Type, &contents)) return nullptr;
    THPObjectPtr now;
    if (is_plain(object)) {
      if (has_contents(object, contents)) continue;
      now = plain_contents(object);
    } else {
      const Described what = described(object, describe);
      if (!what.both) return nullptr;
      if (what.contents == Py_None || are_same(what.contents, contents)) continue;
      now = Py_NewRef(what.contents);
    }
    THPObjectPtr pair(now ? Py_BuildValue("nO", i, now.get()) : nullptr);
    if (!pair || PyList_Append(changed.get(), pair.get()) != 0) return nullptr;
  }
  return changed.release();
}

}  // namespace torchoffload
