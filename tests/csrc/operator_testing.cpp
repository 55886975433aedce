// A listener that notes what it is shown, for tests of the modes that show operators.
#include <ATen/ThreadLocalState.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "autograd/operator_mode.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

class NotingListener final : public OperatorListener {
 public:
  void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) override {
    names.push_back(c10::toString(op.operator_name()));
    if (throws_at && *throws_at == names.size()) throw std::runtime_error("the listener refuses " + names.back());
    if (calls_more) at::ones({2}).add_(1);  // not shown, since the mode is off
    op.callBoxed(stack);
    held_gil = held_gil || PyGILState_Check() != 0;
  }

  void opaque(const char* name, c10::ArrayRef<at::Tensor> inputs, Region region) override {
    const size_t input_count = inputs.size();
    if (calls_more) at::ones({2}).add_(1);
    const std::vector<at::Tensor> outputs = region();
    regions.push_back({name, input_count, outputs.size()});
  }

  struct RegionSeen {
    std::string name;
    size_t input_count, output_count;
  };
  std::vector<std::string> names;
  std::vector<RegionSeen> regions;
  std::optional<size_t> throws_at;
  bool calls_more = false;
  bool held_gil = false;
};

}  // namespace

void bind_operator_testing(py::module_& module) {
  // On a thread to which PyTorch gives what the caller's has: its modes among it, as autograd's threads have them.
  module.def("in_thread_with_state", [](const py::function& function) {
    const py::gil_scoped_release released;
    const at::ThreadLocalState state;
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(state);
      const py::gil_scoped_acquire acquired;
      function();
    }).join();
  });
  py::class_<NotingListener, std::shared_ptr<NotingListener>>(module, "NotingListener")
      .def(py::init<>())
      .def_readonly("names", &NotingListener::names)
      .def_property_readonly("regions",
                             [](const NotingListener& self) {
                               py::list list;
                               for (const auto& seen : self.regions)
                                 list.append(py::make_tuple(seen.name, seen.input_count, seen.output_count));
                               return list;
                             })
      .def_readwrite("throws_at", &NotingListener::throws_at)
      .def_readwrite("calls_more", &NotingListener::calls_more)
      .def_readonly("held_gil", &NotingListener::held_gil)
      .def("listener", [](std::shared_ptr<NotingListener> self) {
        return py::reinterpret_steal<py::object>(to_python(std::move(self)));
      });
}

}  // namespace torchoffload
