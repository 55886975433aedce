// BackgroundCall, with a call that waits for the test between its two parts; the limits of waits; threads that cannot
// be started; names of files.
#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

#include "system/background_call.h"
#include "system/file_io.h"
#include "system/host_wait.h"
#include "system/process.h"

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
  module.def(
      "set_wait_limits",
      [](int slice_ms, int until_told_ms, int at_exit_ms) {
        wait_limits = {std::chrono::milliseconds(slice_ms), std::chrono::milliseconds(until_told_ms),
                       std::chrono::milliseconds(at_exit_ms)};
      },
      py::kw_only(), py::arg("slice_ms") = 100, py::arg("until_told_ms") = 30'000, py::arg("at_exit_ms") = 30'000);
  module.def("refuse_threads", [](int error) { thread_refusal = error; }, py::arg("errno"));
  module.def("quoted", [](const py::bytes& path) { return quoted(path); });
}

}  // namespace torchoffload
