// The module: the functions that Python calls, in Python's types. The hooks themselves are in hooks.cpp.
#include <torch/csrc/utils/pybind.h>

#include <future>
#include <stdexcept>
#include <string>

#include "autograd/context.h"
#include "autograd/held_tensor.h"
#include "autograd/hooks.h"
#include "autograd/input_copies.h"
#include "autograd/operator_counter.h"
#include "autograd/operator_mode.h"
#include "autograd/recorded_call.h"
#include "autograd/saved_tensor.h"
#include "autograd/storage_addresses.h"
#include "autograd/user_code.h"
#include "core/planning/frontier.h"
#include "core/planning/joint_plan.h"
#include "device/backends.h"
#include "engine/operation.h"
#include "engine/registry.h"
#include "engine/statistics.h"
#include "storage/tiered_store.h"
#include "system/host_memory.h"
#include "system/host_wait.h"
#include "system/local_world.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace torchoffload {

#ifdef TORCHOFFLOAD_TESTING
void bind_testing(py::module_& module);
#endif

namespace {

// A new reference that a function of CPython's kind returned. Throws the Python exception that it has set.
py::object taken(PyObject* reference) {
  if (reference == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(reference);
}

Placement parse_tier(const std::string& name) {
  if (name == "host") return Placement::Host;
  if (name == "disk") return Placement::Disk;
  throw py::value_error("torchoffload: tier must be \"host\" or \"disk\", not \"" + name + "\"");
}

template <typename Value>
std::optional<Value> optional(const py::kwargs& arguments, const char* name) {
  return arguments[name].cast<std::optional<Value>>();
}

// The counts that rows of tapes and of modules have in common.
template <typename Row>
py::dict common_to_dict(const Row& row) {
  py::dict kept_records, kept_bytes;
  for (size_t reason = 1; reason < kReasonCount; ++reason) {
    if (row.records_kept[reason] == 0) continue;
    const char* const name = to_string(static_cast<Reason>(reason));
    kept_records[name] = row.records_kept[reason];
    kept_bytes[name] = row.bytes_kept[reason];
  }
  return py::dict("records_offloaded"_a = row.records_offloaded, "bytes_offloaded"_a = row.bytes_offloaded,
                  "records_kept"_a = kept_records, "bytes_kept"_a = kept_bytes);
}

py::dict to_dict(const TapeRow& row) {
  py::dict dict = common_to_dict(row);
  dict["records_reloaded"] = row.records_reloaded;
  dict["bytes_reloaded"] = row.bytes_reloaded;
  dict["records_deduplicated"] = row.records_deduplicated;
  dict["bytes_deduplicated"] = row.bytes_deduplicated;
  dict["bytes_away"] = row.bytes_away;
  dict["bytes_at_once"] = row.bytes_at_once;
  dict["window_waits"] = row.window_waits;
  dict["passed_by"] = row.passed_by;
  return dict;
}

py::dict stats() REQUIRES(gil) {
  Statistics& statistics = Statistics::global();
  uint64_t live_records = 0;
  std::vector<TapeRow> rows(statistics.finished.begin(), statistics.finished.end());
  for (const auto& engine : all_engines()) {
    live_records += engine->ledger().live_records();
    engine->append_live_rows(rows);
  }
  if (rows.size() > Statistics::kRowLimit) rows.erase(rows.begin(), rows.end() - Statistics::kRowLimit);
  const PinnedMemory pinned = pinned_memory();
  statistics.peak_pinned_bytes = std::max(statistics.peak_pinned_bytes, pinned.held_bytes);
  py::list tapes;
  for (const TapeRow& row : rows) tapes.append(to_dict(row));
  py::dict dict = to_dict(statistics.totals);
  dict["handles"] = statistics.handles;
  dict["live_handles"] = statistics.live_handles;
  dict["live_records"] = live_records;
  dict["live_slots"] = statistics.live_slots;
  dict["live_tapes"] = statistics.live_tapes;
  dict["slot_bytes"] = statistics.slot_bytes;
  dict["peak_slot_bytes"] = statistics.peak_slot_bytes;
  dict["pinned_bytes"] = pinned.held_bytes, dict["pinned_bytes_used"] = pinned.used_bytes;
  dict["peak_pinned_bytes"] = statistics.peak_pinned_bytes;
  dict["peak_offload_window_bytes"] = statistics.peak_offload_window_bytes;
  dict["peak_reload_window_bytes"] = statistics.peak_reload_window_bytes;
  const SpillCounts spill = spill_counts();
  dict["bytes_spilled"] = spill.spilled_bytes, dict["bytes_fetched"] = spill.fetched_bytes;
  dict["disk_waits"] = spill.wait_count, dict["disk_wait_s"] = spill.wait_s;
  dict["budget_bytes_used"] = statistics.charged_bytes;
  dict["tapes"] = tapes;
  return dict;
}

py::list module_rows(const py::handle& object) {
  const Context* const context = context_of(object.ptr());
  if (context == nullptr) throw py::error_already_set();
  py::list rows;
  for (const ModuleRow& row : context->module_rows()) rows.append(common_to_dict(row));
  return rows;
}

py::list live_saves() {
  py::list list;
  for (const LiveSave& save : Saved::all_alive()) {
    list.append(py::make_tuple(save.dtype, save.sizes ? py::object(py::tuple(py::cast(*save.sizes))) : py::none(),
                               save.nbytes, save.age_s));
  }
  return list;
}

py::list end_profile() REQUIRES(gil) {
  py::list devices;
  for (const EngineProfile& profile : stop_profile()) {
    py::list entries;
    for (const Timeline::Entry& entry : profile.entries) {
      entries.append(py::make_tuple(to_string(entry.kind), entry.begin_s, entry.end_s, entry.tape, entry.record,
                                    entry.nbytes, entry.is_kept, entry.out_bytes, entry.in_bytes, entry.device_bytes));
    }
    devices.append(py::make_tuple(profile.device, entries));
  }
  return devices;
}

py::dict host_memory() REQUIRES(gil) {
  const HostMemory memory = read_host_memory();
  return py::dict("total"_a = memory.total_bytes, "available"_a = memory.available_bytes,
                  "limit"_a = memory.limit_bytes, "limit_used"_a = memory.limit_used_bytes,
                  "limit_inactive_file"_a = memory.limit_inactive_file_bytes,
                  "default_budget"_a = default_budget_bytes(memory, local_world_size(), pinned_memory().held_bytes));
}

OperatorGroup parse_group(const py::handle& given) {
  OperatorGroup group;
  group.duration_ns = given.attr("duration_ns").cast<uint64_t>();
  group.nbytes = given.attr("nbytes").cast<uint64_t>();
  group.inputs = given.attr("inputs").cast<std::vector<uint32_t>>();
  group.may_keep = given.attr("may_keep").cast<bool>();
  group.may_recompute = given.attr("may_recompute").cast<bool>();
  group.is_needed = given.attr("is_needed").cast<bool>();
  return group;
}

py::list frontier(const py::iterable& groups, const std::vector<uint32_t>& draws) {
  std::vector<OperatorGroup> parsed;
  for (const py::handle& group : groups) parsed.push_back(parse_group(group));
  py::list corners;
  for (const BlockCorner& corner : block_frontier(parsed, draws)) {
    py::list kept, recomputed;
    for (size_t group = 0; group < corner.choices.size(); ++group) {
      if (corner.choices[group] == Choice::Kept) kept.append(group);
      if (corner.choices[group] == Choice::Recomputed) recomputed.append(group);
    }
    corners.append(py::make_tuple(corner.kept_bytes, corner.recompute_ns, kept, recomputed));
  }
  return corners;
}

BlockWay parse_way(const py::handle& given) {
  return {given.attr("recompute_s").cast<double>(), given.attr("kept").cast<std::vector<uint32_t>>(),
          given.attr("input_bytes").cast<uint64_t>(), given.attr("is_plain").cast<bool>()};
}

BlockKind parse_kind(const py::handle& given) {
  BlockKind kind;
  kind.forward_s = given.attr("forward_s").cast<double>();
  kind.backward_s = given.attr("backward_s").cast<double>();
  for (const py::handle& output : given.attr("outputs")) {
    kind.outputs.push_back({output.attr("sizes").cast<std::vector<uint64_t>>(), output.attr("ready_s").cast<double>(),
                            output.attr("may_move").cast<bool>()});
  }
  for (const py::handle& way : given.attr("ways")) kind.ways.push_back(parse_way(way));
  return kind;
}

StepOfBlocks parse_step(const py::handle& given) {
  StepOfBlocks step;
  for (const py::handle& kind : given.attr("kinds")) step.kinds.push_back(parse_kind(kind));
  for (const py::handle& call : given.attr("calls")) {
    step.calls.push_back({call.attr("kind").cast<uint32_t>(), call.attr("forward_bytes").cast<uint64_t>(),
                          call.attr("backward_bytes").cast<uint64_t>()});
  }
  step.head_s = given.attr("head_s").cast<double>();
  step.loss_s = given.attr("loss_s").cast<double>();
  step.end_s = given.attr("end_s").cast<double>();
  step.loss_bytes = given.attr("loss_bytes").cast<uint64_t>();
  step.least_moved_bytes = given.attr("least_moved_bytes").cast<uint64_t>();
  step.tier_bytes = given.attr("tier_bytes").cast<uint64_t>();
  step.may_move = given.attr("may_move").cast<bool>();
  step.leaves_room = given.attr("leaves_room").cast<bool>();
  step.link = {given.attr("out_bytes_per_s").cast<double>(), given.attr("in_bytes_per_s").cast<double>(),
               given.attr("latency_s").cast<double>()};
  return step;
}

py::dict plan_to_dict(const JointPlan& plan) {
  py::list calls;
  for (size_t i = 0; i < plan.calls.size(); ++i) {
    const CallWindows& windows = plan.windows[i];
    calls.append(py::make_tuple(plan.calls[i].way, plan.calls[i].moved, plan.calls[i].moves, windows.offload_bytes,
                                windows.reload_bytes));
  }
  return py::dict("calls"_a = calls, "step_s"_a = plan.step_s, "recompute_s"_a = plan.recompute_s,
                  "peak_bytes"_a = plan.peak_bytes, "loss_bytes"_a = plan.loss_bytes, "kept_bytes"_a = plan.kept_bytes,
                  "moved_bytes"_a = plan.moved_bytes, "forward_spare_bytes"_a = plan.forward_spare_bytes,
                  "backward_spare_bytes"_a = plan.backward_spare_bytes, "window_bytes"_a = plan.window_bytes,
                  "loss_window_bytes"_a = plan.loss_window_bytes);
}

// Plans for several steps in the same memory, which are searched for at once, by a thread each.
py::list joint_plans(const py::iterable& given, uint64_t memory_bytes) {
  std::vector<StepOfBlocks> steps;
  for (const py::handle& step : given) steps.push_back(parse_step(step));
  std::vector<std::optional<JointPlan>> plans;
  {
    const py::gil_scoped_release others_run;
    std::vector<std::future<std::optional<JointPlan>>> found;
    for (size_t i = 1; i < steps.size(); ++i) found.push_back(std::async(plan_step, std::cref(steps[i]), memory_bytes));
    if (!steps.empty()) plans.push_back(plan_step(steps.front(), memory_bytes));
    for (auto& plan : found) plans.push_back(plan.get());
  }
  py::list results;
  for (const std::optional<JointPlan>& plan : plans)
    results.append(plan ? py::object(plan_to_dict(*plan)) : py::none());
  return results;
}

JointPlan parse_plan(const py::handle& given) {
  JointPlan plan;
  for (const py::handle& call : given.attr("calls")) {
    plan.calls.push_back({call.attr("way").cast<uint32_t>(), call.attr("moved").cast<std::vector<uint32_t>>(),
                          call.attr("moves").cast<bool>()});
    plan.windows.push_back({call.attr("offload_bytes").cast<uint64_t>(), call.attr("reload_bytes").cast<uint64_t>()});
  }
  plan.window_bytes = given.attr("window_bytes").cast<uint64_t>();
  plan.loss_window_bytes = given.attr("loss_window_bytes").cast<uint64_t>();
  return plan;
}

// For each of the factors the times of each plan in a step with such times, in seconds: of the whole step, and of its
// recomputation.
std::vector<std::vector<std::pair<double, double>>> joint_plan_times(
    const py::handle& given, const py::iterable& planned, const std::vector<std::array<double, 3>>& factors) {
  const StepOfBlocks surveyed = parse_step(given);
  std::vector<JointPlan> plans;
  for (const py::handle& plan : planned) plans.push_back(parse_plan(plan));
  std::vector<std::vector<std::pair<double, double>>> times;
  for (const auto& [pace, again, rate] : factors) {
    const StepOfBlocks step = with_times(surveyed, {pace, again, rate});
    times.emplace_back();
    for (JointPlan& plan : plans) {
      time_plan(step, plan);
      times.back().emplace_back(plan.step_s, plan.recompute_s);
    }
  }
  return times;
}

void set_module_windows(const py::handle& context, const std::vector<std::array<uint64_t, 3>>& given) {
  Context* const found = context_of(context.ptr());
  if (found == nullptr) throw py::error_already_set();
  std::vector<ModuleWindows> windows;
  for (const auto& [offload_bytes, after_bytes, reload_bytes] : given)
    windows.push_back({offload_bytes, after_bytes, reload_bytes});
  found->set_windows(std::move(windows));
}

// From the next call of the module on.
void change_module_windows(const py::handle& context, uint32_t number, const std::array<uint64_t, 3>& given) {
  Context* const found = context_of(context.ptr());
  if (found == nullptr) throw py::error_already_set();
  const auto& [offload_bytes, after_bytes, reload_bytes] = given;
  found->change_windows(number, {offload_bytes, after_bytes, reload_bytes});
}

uint64_t trim() REQUIRES(gil) {
  drop_unheld();
  try {
    return trim_stores();
  } catch (const WaitAbandoned&) {  // if the handler of Ctrl-C raises nothing, the wait begins anew
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return trim();
  }
}

OnFull parse_on_full(const std::string& name) {
  if (name == "error") return OnFull::Error;
  return name == "disk" ? OnFull::Disk : OnFull::Keep;
}

// ---- planned blocks ----

std::shared_ptr<BlockActions> parse_actions(const std::vector<std::pair<std::string, std::string>>& operators,
                                            const std::string& actions, const std::vector<uint64_t>& rewritten,
                                            const std::vector<uint64_t>& held, bool keeps_if_left) {
  constexpr char kRunsOnce = 4;
  if (actions.size() != operators.size()) throw py::value_error("one action for each operator");
  if (rewritten.size() != operators.size() || held.size() != operators.size())
    throw py::value_error("two masks for each operator");
  auto parsed = std::make_shared<BlockActions>();
  parsed->keeps_if_left = keeps_if_left;
  for (const auto& [name, overload] : operators)
    parsed->operators.push_back(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
  for (size_t number = 0; number < actions.size(); ++number) {
    const auto action = static_cast<BlockActions::Action>(actions[number] & ~kRunsOnce);
    const bool runs_once = (actions[number] & kRunsOnce) != 0;
    parsed->planned.push_back({action, runs_once, rewritten[number], held[number]});
  }
  return parsed;
}

std::shared_ptr<RecordedCall> make_call(const std::shared_ptr<BlockActions>& plan, const py::object& inputs,
                                        const py::object& context, const py::object& observer, const py::object& clock,
                                        bool verifies, bool times_replay, bool copies_inputs) {
  const auto given = [](const py::object& object) { return object.is_none() ? nullptr : object.ptr(); };
  if (!context.is_none() && context_of(context.ptr()) == nullptr) throw py::error_already_set();
  auto call = std::make_shared<RecordedCall>(RecordedCall::Options{plan, given(context), given(observer), given(clock),
                                                                   verifies, times_replay, copies_inputs});
  std::vector<void*> storages;
  if (inputs.is_none()) return call;
  if (PyAnySet_Check(inputs.ptr())) {
    for (const py::handle& each : inputs) storages.push_back(PyLong_AsVoidPtr(each.ptr()));
  }
  call->note_inputs(storages);
  return call;
}

py::list read_storages(const RecordedCall& call) {
  py::list storages;
  for (const RecordedStorage& each : call.record().storages) {
    py::dict dict;
    dict["nbytes"] = each.nbytes;
    dict["is_input"] = each.is_input || (each.pinned == 0 && each.is_movable && !each.is_leaf && !each.is_made_unseen);
    dict["is_held"] = each.is_pinned() && each.was_made_here();
    dict["is_made"] = each.was_made_here() || each.is_made_unseen;
    dict["is_saved"] = each.is_saved;
    dict["epochs"] = each.epoch;
    storages.append(std::move(dict));
  }
  return storages;
}

// The operators of a call, in Python's types. Call it before finish(), which forgets the operators that nothing needs.
py::list read_operators(const RecordedCall& call) {
  const RecordedOperators& record = call.record();
  py::list operators;
  for (const RecordedOperator& each : record.operators) {
    py::list reads, makes, writes;
    for (uint32_t ref = each.first_ref; ref < each.first_ref + each.ref_count; ++ref) {
      const TensorRef& read = record.refs[ref];
      if (read.from == TensorRef::From::Storage) reads.append(py::make_tuple(read.number, read.epoch));
    }
    for (const RecordedOperator::Made& made : each.makes) makes.append(made.storage);
    for (const StorageNumber written : each.writes) writes.append(written);
    py::dict dict;
    dict["name"] = each.handle ? each.handle->schema().name() : std::string();
    dict["overload"] = each.handle ? each.handle->schema().overload_name() : std::string();
    dict["reads"] = reads;
    dict["makes"] = makes;
    dict["writes"] = writes;
    dict["counted"] = each.counted;
    dict["draws"] = !each.random_states.empty();
    dict["runs_once"] = each.runs_once;
    operators.append(std::move(dict));
  }
  return operators;
}

py::list read_moments(RecordedCall& call) {
  py::list moments;
  for (RecordedCall::Moment& each : call.moments()) {
    moments.append(py::make_tuple(each.counted, py::reinterpret_borrow<py::object>(each.begin.get()),
                                  py::reinterpret_borrow<py::object>(each.end.get())));
  }
  return moments;
}

void add_recorded_calls(py::module_& m) {
  py::class_<BlockActions, std::shared_ptr<BlockActions>>(m, "BlockActions")
      .def(py::init(&parse_actions), py::arg("operators"), py::arg("actions"), py::arg("rewritten"), py::arg("held"),
           py::arg("keeps_if_left"), py::pos_only());
  py::class_<RecordedCall, std::shared_ptr<RecordedCall>>(m, "RecordedCall")
      .def(py::init(&make_call), py::arg("plan").none(true), py::arg("inputs"), py::arg("context"), py::arg("observer"),
           py::arg("clock"), py::arg("verifies"), py::arg("times_replay"), py::arg("copies_inputs"))
      .def("listener", [](const std::shared_ptr<RecordedCall>& self) { return taken(to_python(self)); })
      .def("pack_hook", [](const std::shared_ptr<RecordedCall>& self) { return taken(pack_hook_of(self)); })
      .def("finish", &RecordedCall::finish)
      .def("verify", &RecordedCall::verify)
      .def("settle", &RecordedCall::settle, py::arg("keeps_all"), py::pos_only())
      .def("storages", &read_storages)
      .def("operators", &read_operators)
      .def("moments", &read_moments)
      .def_property_readonly("left_at", &RecordedCall::left_at)
      .def_property_readonly("counts", [](const RecordedCall& self) {
        py::dict dict;
        dict["replays"] = self.replay_count();
        dict["replayed_operators"] = self.replayed_operator_count();
        return dict;
      });
}

void add_input_copies(py::module_& m) {
  py::class_<CopiedInput>(m, "CopiedInput")
      .def(py::init<const at::Tensor&>(), py::arg("original"), py::pos_only())
      .def_property_readonly("tensor", &CopiedInput::tensor)
      .def_property_readonly("was_written", &CopiedInput::was_written);
}

// The functions by which `fit` plans blocks and runs them by a plan.
void add_planned_blocks(py::module_& m) {
  m.def("block_frontier", frontier, py::arg("groups"), py::arg("draws"), py::pos_only());
  m.def("set_module_windows", set_module_windows, py::arg("context"), py::arg("windows"), py::pos_only());
  m.def("change_module_windows", change_module_windows, py::arg("context"), py::arg("number"), py::arg("windows"),
        py::pos_only());
  m.def("joint_plans", joint_plans, py::arg("steps"), py::arg("memory_bytes"), py::pos_only());
  m.def(
      "least_joint_plan",
      [](const py::handle& given, uint64_t size) { return plan_to_dict(least_plan(parse_step(given), size)); },
      py::arg("step"), py::arg("window_bytes"), py::pos_only());
  m.def("joint_plan_times", joint_plan_times, py::arg("step"), py::arg("plans"), py::arg("factors"), py::pos_only());
  m.def(
      "storage_addresses", [](const py::handle& value) { return taken(storage_addresses(value.ptr())); },
      py::arg("value"), py::pos_only());
  add_recorded_calls(m);
  add_input_copies(m);
}

}  // namespace

ContextArguments parse_context_arguments(PyObject* args, PyObject* kwargs) {
  if (PyTuple_GET_SIZE(args) != 0 || kwargs == nullptr) throw py::type_error("Context takes keyword arguments only");
  const auto given = py::reinterpret_borrow<py::kwargs>(kwargs);
  ContextArguments parsed;
  ContextOptions& options = parsed.options;
  options.tier = parse_tier(given["tier"].cast<std::string>());
  options.use_pin_memory = given["use_pin_memory"].cast<bool>();
  options.use_streams = given["use_streams"].cast<bool>();
  options.learn = given["learn"].cast<bool>();
  options.min_offload_size = given["min_offload_size"].cast<uint64_t>();
  options.windows.offload_window_bytes = optional<uint64_t>(given, "offload_window_bytes");
  options.windows.max_fwd_stash_size = optional<uint64_t>(given, "max_fwd_stash_size");
  options.windows.reload_window_bytes = optional<uint64_t>(given, "reload_window_bytes");
  options.disk_dir = given["disk_dir"].cast<std::vector<std::string>>();
  options.budget_bytes = optional<uint64_t>(given, "budget_bytes");
  options.on_full = parse_on_full(given["on_full"].cast<std::string>());
  parsed.warn = given["warn"].cast<py::object>().release().ptr();
  return parsed;
}

// Not free-threaded: ledger and windows are touched only with the GIL held.
PYBIND11_MODULE(TORCHOFFLOAD_MODULE_NAME, m) {
  m.doc() = "torchoffload's compiled core";
  m.attr("built_with_cuda") = find_backend_kind("cuda") != nullptr;
  const py::object parameter = py::module_::import("torch.nn").attr("Parameter");
  if (!add_hooks(m.ptr(), parameter.ptr()) || !add_operator_functions(m.ptr())) throw py::error_already_set();
  m.def("never_offload", never_offload, py::arg("tensor").none(false), py::pos_only());
  m.def(
      "note_saving_code",
      [](const py::handle& code) {
        if (!note_saving_code(code.ptr())) throw py::error_already_set();
      },
      py::arg("code"), py::pos_only());
  m.def("stats", stats);
  m.def("module_rows", module_rows, py::arg("context"), py::pos_only());
  m.def("reset_stats", []() REQUIRES(gil) {
    Statistics::global().reset();
    reset_spill_counts();
  });
  m.def("trim", trim);
  add_planned_blocks(m);
  m.def("start_profile", start_profile);
  m.def("stop_profile", end_profile);
  m.def("live_saves", live_saves);
  m.def("host_memory", host_memory);
  m.def("accelerator_available", accelerator_available);
  m.def("backend_notes", backend_notes);
  set_ask_interrupted(is_interrupted);
  py::module_::import("atexit").attr("register")(py::cpp_function([]() REQUIRES(gil) {
    Operation::shut_down();
    stop_threads();
  }));
#ifdef TORCHOFFLOAD_TESTING
  ask_whether_gil_is_held = [] { return PyGILState_Check() == 1; };
  bind_testing(m);
#endif
}

}  // namespace torchoffload
