// BackgroundCall, with a call that waits for the test between its two parts.
#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

#include "system/background_call.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

struct TestedCall {
  std::atomic<bool> may_return = false;
  std::atomic<int> parts_done = 0;
  BackgroundCall call{"tested-call", [this](const BackgroundCall& self) {
                        ++parts_done;
                        while (!may_return) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                        if (self.may_go_on()) ++parts_done;
                      }};
};

}  // namespace

void bind_system_testing(py::module_& module) {
  py::class_<TestedCall>(module, "BackgroundCall")
      .def(py::init<>())
      .def("begin", [](TestedCall& self) { self.call.begin(); })
      .def("let_return", [](TestedCall& self) { self.may_return = true; })
      .def_property_readonly("parts_done", [](const TestedCall& self) { return self.parts_done.load(); })
      .def(
          "await_end", [](TestedCall& self) { self.call.await_end(); }, NoGil())
      .def("stop", [](TestedCall& self) { self.call.stop(); }, NoGil());
}

}  // namespace torchoffload
