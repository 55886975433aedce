// The simulated devices that PyTorch knows as "privateuseone", as Python tests control them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "testing/private_device.h"

namespace py = pybind11;

namespace torchoffload {

void bind_private_testing(py::module_& module) {
  module.attr("private_device_count") = kPrivateDevices;
  module.def("register_private_devices", &register_private_devices);
  module.def(
      "start_private_simulation",
      [](const std::string& mode, uint64_t seed) {
        SimOptions options;
        options.mode = mode == "early" ? SimMode::Early : mode == "late" ? SimMode::Late : SimMode::Seeded;
        options.seed = seed;
        start_private_simulation(options);
      },
      py::arg("mode"), py::arg("seed"));
  module.def("stop_private_simulation", &stop_private_simulation);
  module.def("private_user_count",
             [](uint64_t address) { return SimWorld::instance().user_count(reinterpret_cast<const void*>(address)); });
  module.def("set_private_streams", &set_private_streams);
  module.def("set_private_events", &set_private_events);
  module.def("refuse_private_host_memory", &refuse_private_host_memory);
}

}  // namespace torchoffload
