// The submodule `testing` of the test build: what tests may see and do below the public face.
#include <torch/csrc/utils/pybind.h>

#include "engine/registry.h"

namespace py = pybind11;

namespace torchoffload {

void bind_core_testing(py::module_& module);
void bind_plan_testing(py::module_& module);
void bind_system_testing(py::module_& module);
void bind_storage_testing(py::module_& module);
void bind_simulated_testing(py::module_& module);
void bind_private_testing(py::module_& module);
void bind_codec_testing(py::module_& module);
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
  bind_codec_testing(testing);
  bind_tiered_testing(testing);
  bind_operator_testing(testing);
  bind_allocator_testing(testing);
  // On each device that the process has in use by now, the codes are ready, or known not to work.
  testing.def("await_coders", [] {
    make_coders();
    const std::vector<Coder*> coders = all_coders();
    const BlockingSection blocking;
    for (Coder* const coder : coders) {
      coder->prepare();
      coder->await_prepared();
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
