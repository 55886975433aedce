// The limits of waits; threads that cannot be started; names of files.
#include <pybind11/pybind11.h>

#include <chrono>

#include "system/file_io.h"
#include "system/host_wait.h"
#include "system/process.h"

namespace py = pybind11;

namespace torchoffload {

void bind_system_testing(py::module_& module) {
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
