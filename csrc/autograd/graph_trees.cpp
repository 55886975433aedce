#include "autograd/graph_trees.h"

#include <Python.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

#include "device/backends.h"

namespace torchoffload {

namespace {

// The pools of this thread's trees, as torchoffload._pytorch.graph_trees.pools() gives them: [(device, (id, id))].
bool read_pools(PyObject* trees, std::vector<GraphPool>& pools) {
  THPObjectPtr finder(PyImport_ImportModule("torchoffload._pytorch.graph_trees"));
  if (!finder) return false;
  THPObjectPtr found(PyObject_CallMethod(finder.get(), "pools", "O", trees));
  if (!found) return false;
  for (Py_ssize_t next = 0; next < PyList_Size(found.get()); ++next) {
    int device = 0;
    unsigned long long first = 0;
    unsigned long long second = 0;
    if (PyArg_ParseTuple(PyList_GET_ITEM(found.get(), next), "i(KK)", &device, &first, &second) == 0) return false;
    pools.push_back({device, {first, second}});
  }
  return true;
}

}  // namespace

bool look_for_graph_trees() {
  static GraphPools* const graph_memory = graph_pools();
  if (graph_memory == nullptr) return true;
  static PyObject* const name = PyUnicode_InternFromString("torch._inductor.cudagraph_trees");
  THPObjectPtr trees(PyImport_GetModule(name));
  if (!trees) return PyErr_Occurred() == nullptr;
  if (!graph_memory->may_have_changed()) return true;
  std::vector<GraphPool> pools;
  if (!read_pools(trees.get(), pools)) return false;
  graph_memory->add(pools);
  return true;
}

}  // namespace torchoffload
