// The plan and the learner, driven from Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/planning/learner.h"
#include "core/planning/plan.h"
#include "core/planning/tape_order.h"
#include "engine/registry.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

using Sizes = std::vector<uint64_t>;
using Options = std::tuple<std::optional<uint64_t>, std::optional<uint64_t>, std::optional<uint64_t>>;

WindowOptions window_options(const Options& options) {
  return {std::get<0>(options), std::get<1>(options), std::get<2>(options)};
}

StepTimes step_times(const std::vector<std::pair<double, double>>& records, double compute_s, double out_rate,
                     double in_rate, double latency_s) {
  StepTimes times;
  for (const auto& [ready_s, needed_s] : records) times.records.push_back({ready_s, needed_s});
  times.compute_s = compute_s;
  times.link = {out_rate, in_rate, latency_s};
  return times;
}

StepShape step_shape(const Sizes& nbytes, const Sizes& last_save, const std::vector<bool>& joins) {
  StepShape shape{nbytes, last_save, {}};
  for (const bool is_same_operator : joins) shape.kinds.push_back({.is_same_operator = is_same_operator});
  return shape;
}

// What is kept counts towards the windows, and no other limit keeps an engine from keeping it.
Plan plan_of(const std::vector<bool>& kept, const Sizes& offload_windows, uint64_t reload_window_bytes) {
  Plan plan;
  for (const bool is_kept : kept) plan.kept.push_back(is_kept ? Reason::NeededSoon : Reason::None);
  plan.offload_bytes = offload_windows;
  plan.reload_bytes = reload_window_bytes;
  return plan;
}

const char* name_of(StepEvent::What what) {
  switch (what) {
    case StepEvent::What::WaitForOffload:
      return "wait";
    case StepEvent::What::Ask:
      return "ask";
    case StepEvent::What::ReloadAskedFor:
      return "reload";
    case StepEvent::What::ReloadAhead:
      return "reload ahead";
  }
  return "";
}

py::dict to_dict(const Plan& plan) {
  py::list kept;
  for (const Reason reason : plan.kept) kept.append(to_string(reason));
  py::dict dict;
  dict["kept"] = kept;
  dict["offload_window_bytes"] = plan.offload_bytes.empty() ? 0 : *std::ranges::max_element(plan.offload_bytes);
  dict["reload_window_bytes"] = plan.reload_bytes;
  return dict;
}

py::dict to_dict(const PlannedStep& step) {
  py::dict dict;
  dict["step_s"] = step.step_s;
  dict["bound_s"] = step.bound_s;
  dict["moved_bytes"] = step.moved_bytes;
  dict["kept_bytes"] = step.kept_bytes;
  dict["held_forward_bytes"] = step.held.forward;
  dict["held_forward_late_bytes"] = step.held.forward_late;
  dict["held_backward_bytes"] = step.held.backward;
  return dict;
}

}  // namespace

void bind_plan_testing(py::module_& module) {
  module.def("largest_sum_within", &largest_sum_within);
  module.def("default_windows", [](const Options& options, uint64_t largest_record_bytes) {
    const WindowBytes windows = default_windows(window_options(options), largest_record_bytes);
    return std::pair(windows.offload_bytes, windows.reload_bytes);
  });

  py::class_<StepTimes>(module, "StepTimes")
      .def(py::init(&step_times), py::arg("records"), py::arg("compute_s"), py::arg("out_rate"), py::arg("in_rate"),
           py::arg("latency_s") = 0.0);
  // The plan, and what a step under it takes where there are times; else one of which only the order is known.
  // `joins`: records that were saved by the operator of the record before.
  module.def(
      "plan_step",
      [](const Sizes& nbytes, const Sizes& last_save, const StepTimes* times, const Options& options, bool keeps_end,
         const std::vector<bool>& joins) {
        const StepShape shape = step_shape(nbytes, last_save, joins);
        const Plan plan = make_plan(shape, times, window_options(options), keeps_end);
        const StepTimes in_order = times_in_order(nbytes.size());
        return std::pair(to_dict(plan), to_dict(simulate(shape, times != nullptr ? *times : in_order, plan)));
      },
      py::arg("nbytes"), py::arg("last_save"), py::arg("times").none(true), py::arg("options") = Options{},
      py::arg("keeps_end") = true, py::arg("joins") = std::vector<bool>{});
  // What the first step takes, of which nothing is known.
  module.def(
      "first_step",
      [](const Sizes& nbytes, const Sizes& last_save, const StepTimes* times, const Options& options,
         const std::vector<bool>& joins) {
        const StepShape shape = step_shape(nbytes, last_save, joins);
        const StepTimes in_order = times_in_order(nbytes.size());
        return to_dict(
            simulate(shape, times != nullptr ? *times : in_order, first_plan(shape, window_options(options))));
      },
      py::arg("nbytes"), py::arg("last_save"), py::arg("times").none(true), py::arg("options") = Options{},
      py::arg("joins") = std::vector<bool>{});
  // What a step takes under a plan that was made elsewhere. `offload_windows`: from each record to the next;
  // `reload_windows`: from the moment on at which backward asks for each. `most_s`: as simulate() has it.
  module.def(
      "simulate",
      [](const Sizes& nbytes, const Sizes& last_save, const StepTimes& times, const std::vector<bool>& kept,
         const Sizes& offload_windows, const Sizes& reload_windows, double most_s) {
        Plan plan = plan_of(kept, offload_windows, 0);
        plan.reload_bytes_from = reload_windows;
        return to_dict(simulate({nbytes, last_save, {}}, times, plan, nullptr, most_s));
      },
      py::arg("nbytes"), py::arg("last_save"), py::arg("times"), py::arg("kept"), py::arg("offload_windows"),
      py::arg("reload_windows"), py::arg("most_s") = std::numeric_limits<double>::infinity());

  // What happens in such a step, in order: what it is, and the number of the record. `offload_windows`: from each
  // record to the next.
  module.def("step_events", [](const Sizes& nbytes, const Sizes& last_save, const StepTimes& times,
                               const std::vector<bool>& joins, const std::vector<bool>& kept,
                               const Sizes& offload_windows, uint64_t reload_window_bytes) {
    std::vector<StepEvent> events;
    simulate(step_shape(nbytes, last_save, joins), times, plan_of(kept, offload_windows, reload_window_bytes), &events);
    std::vector<std::pair<std::string, size_t>> named;
    for (const StepEvent& event : events) named.emplace_back(name_of(event.what), event.record);
    return named;
  });
  // Engines follow this plan in tapes of a known shape with as many records.
  module.def("plan_engines_as",
             [](const std::vector<bool>& kept, const Sizes& offload_windows, uint64_t reload_window_bytes) {
               for (const auto& engine : all_engines())
                 engine->lessons().plan_as(plan_of(kept, offload_windows, reload_window_bytes));
             });

  py::class_<Learner::Trace>(module, "Trace")
      .def_readonly("is_timed", &Learner::Trace::is_timed)
      .def_readonly("expected_count", &Learner::Trace::expected_count);
  py::class_<Learner>(module, "Learner")
      .def(py::init<>())
      .def(
          "begin", [](Learner& self, const Options& options) { return self.begin(window_options(options)); },
          py::arg("options") = Options{})
      .def(
          "next",
          [](Learner& self, Learner::Trace& trace, uint64_t nbytes, uint8_t dtype) {
            return std::string(to_string(self.next(trace, nbytes, {.dtype = dtype})));
          },
          py::arg("trace"), py::arg("nbytes"), py::arg("dtype") = 0)
      .def("windows",
           [](Learner& self, const Learner::Trace& trace) {
             const auto windows = self.windows(trace);
             return windows ? std::optional(std::pair(windows->offload_bytes, windows->reload_bytes)) : std::nullopt;
           })
      .def("learn", &Learner::learn)
      .def("backward_began", &Learner::backward_began)
      .def("learn_times", &Learner::learn_times)
      .def("shape_count", &Learner::shape_count)
      .def("structure_count", &Learner::structure_count)
      .def("plan_of", [](Learner& self, uint32_t shape) -> py::object {
        const Plan* const plan = self.plan_of(shape);
        if (plan == nullptr) return py::none();
        return to_dict(*plan);
      });
  py::class_<TapeOrder>(module, "TapeOrder")
      .def(py::init<>())
      .def("opened", [](TapeOrder& self, uint32_t tape) { return self.opened({tape, 0}); })
      .def("gone", &TapeOrder::gone)
      .def("backward_began", &TapeOrder::backward_began)
      .def("is_own_backward_next", &TapeOrder::is_own_backward_next)
      .def("coming",
           [](const TapeOrder& self, size_t places) {
             const auto tape = self.coming(places);
             return tape ? std::optional(tape->index) : std::nullopt;
           })
      .def("left_behind_count", &TapeOrder::left_behind_count);
  module.attr("shape_limit") = Learner::kShapeLimit;
  module.attr("expected_limit") = Learner::kExpectedLimit;
  module.attr("learned_record_limit") = Learner::kRecordLimit;
  module.def("forget_learned", [] {
    for (const auto& engine : all_engines()) engine->forget_learned_steps();
  });
  module.def("structures_learned", [] {
    size_t count = 0;
    for (const auto& engine : all_engines()) count += engine->lessons().learner().structure_count();
    return count;
  });
  module.def("tapes_left_behind", []() REQUIRES(gil) { return Statistics::global().tapes_left_behind; });
  module.def("shapes_learned", [] {
    size_t count = 0;
    for (const auto& engine : all_engines()) count += engine->lessons().learner().shape_count();
    return count;
  });
}

}  // namespace torchoffload
