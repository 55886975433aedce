// The submodule `testing` of the test build: what tests may see and do below the public face.
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <thread>

#include "autograd/python_calls.h"
#include "engine/operation.h"
#include "engine/registry.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

constexpr useconds_t kPauseUs = 1000;

void take_gil() { const WithGil with_gil; }

}  // namespace

void bind_core_testing(py::module_& module);
void bind_plan_testing(py::module_& module);
void bind_system_testing(py::module_& module);
void bind_storage_testing(py::module_& module);
void bind_simulated_testing(py::module_& module);
void bind_private_testing(py::module_& module);
void bind_tiered_testing(py::module_& module);
void bind_operator_testing(py::module_& module);
void bind_allocator_testing(py::module_& module);

void bind_testing(py::module_& module) {
  py::module_ testing = module.def_submodule("testing", "For tests only.");
  bind_core_testing(testing);
  bind_plan_testing(testing);
  bind_system_testing(testing);
  bind_storage_testing(testing);
  bind_simulated_testing(testing);
  bind_private_testing(testing);
  bind_tiered_testing(testing);
  bind_operator_testing(testing);
  bind_allocator_testing(testing);
  // A thread that is not Python's takes the GIL again and again from now on; see Note [Threads at exit].
  testing.def("take_gil_for_ever", [] {
    std::thread([]() noexcept {
      while (true) {
        take_gil();
        usleep(kPauseUs);
      }
    }).detach();
  });
  // The calling thread gives the GIL back again and again.
  testing.def("give_gil_for_ever", [] {
    while (true) {
      const WithoutGil without_gil;
      usleep(kPauseUs);
    }
  });
  testing.def("engine_count", [] { return all_engines().size(); });
  testing.def("held_timeline_entries", [] {
    uint64_t count = 0;
    for (const auto& engine : all_engines()) count += engine->timeline().held_count();
    return count;
  });
  testing.def("check_invariants", [] {
    for (const auto& engine : all_engines()) engine->ledger().check_invariants();
  });
}

}  // namespace torchoffload
