// The simulated device, the log of seam calls and the mutants, as Python tests control them.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/SequenceNumber.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/mutant.h"
#include "device/torch_memory.h"
#include "testing/logging_backend.h"
#include "testing/sim_backend.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

thread_local std::optional<uint64_t> scripted_sequence_number;

uint64_t sequence_number() { return scripted_sequence_number.value_or(at::sequence_number::peek()); }

SimWorld& world_of_tests() { return SimWorld::instance(); }

SimMode mode_of(const std::string& name) {
  if (name == "early") return SimMode::Early;
  if (name == "late") return SimMode::Late;
  if (name == "seeded") return SimMode::Seeded;
  throw std::invalid_argument("mode must be \"late\", \"early\" or \"seeded\", not \"" + name + "\"");
}

void start(const std::string& mode, uint64_t seed, int devices) {
  SimOptions options;
  options.mode = mode_of(mode);
  options.seed = seed;
  options.device_count = devices;
  options.sequence_number = &sequence_number;
  start_simulation(options);
}

void set_mutant(const std::optional<std::string>& name) {
  unsigned index = name ? 0 : static_cast<unsigned>(Mutant::kCount);
  while (index < static_cast<unsigned>(Mutant::kCount) && *name != mutant_name(static_cast<Mutant>(index))) ++index;
  mutant_in_force = static_cast<Mutant>(index);
  if (name && mutant_in_force == Mutant::kCount) throw std::invalid_argument("no mutant is called " + *name);
}

std::vector<std::string> mutant_names() {
  std::vector<std::string> names;
  for (unsigned index = 0; index < static_cast<unsigned>(Mutant::kCount); ++index) {
    names.emplace_back(mutant_name(static_cast<Mutant>(index)));
  }
  return names;
}

// Reload buffers are refused, as CUDA's allocator would, while more than this is allocated on device 0.
void limit_device_memory(std::optional<uint64_t> limit_bytes) {
  if (!limit_bytes) return set_allocation_hook(nullptr);
  set_allocation_hook([limit_bytes] {
    const uint64_t allocated_bytes = world_of_tests().allocated_bytes(0);
    TORCH_CHECK_WITH(OutOfMemoryError, allocated_bytes <= *limit_bytes,
                     "simulated device out of memory: ", allocated_bytes, " bytes are allocated, and the limit is ",
                     *limit_bytes);
  });
}

// The allocation of a reload buffer after the next `after` is refused, and no other.
void refuse_allocation(int64_t after) {
  set_allocation_hook([left = std::make_shared<int64_t>(after)] {
    TORCH_CHECK_WITH(OutOfMemoryError, (*left)-- != 0, "simulated device out of memory: this allocation was refused");
  });
}

// The call at the seam after the next `after` fails, and so do the `times` - 1 after it.
struct SeamFault {
  std::atomic<int64_t> calls{0};
  int64_t after = 0;
  int64_t times = 1;
};
std::shared_ptr<SeamFault> seam_fault;

void fail_seam_calls(int64_t after, int64_t times) {
  seam_fault = std::make_shared<SeamFault>();
  seam_fault->after = after;
  seam_fault->times = times;
  set_seam_hook([fault = seam_fault](const std::string& call) {
    const int64_t number = fault->calls++;
    TORCH_CHECK(number < fault->after || number >= fault->after + fault->times, "simulated fault of the device in ",
                call);
  });
}

// Returns how many calls there were.
int64_t clear_seam_faults() {
  set_seam_hook(nullptr);
  return seam_fault ? std::exchange(seam_fault, nullptr)->calls.load() : 0;
}

// The names of the calls at the seam that were made with the GIL held, and without it.
struct CallsByGil {
  std::mutex mutex;
  std::set<std::string> with_gil, without_gil;
};
std::shared_ptr<CallsByGil> calls_by_gil;

void watch_gil_at_seam() {
  calls_by_gil = std::make_shared<CallsByGil>();
  set_seam_hook([calls = calls_by_gil](const std::string& call) {
    const std::lock_guard lock(calls->mutex);
    (PyGILState_Check() == 1 ? calls->with_gil : calls->without_gil).insert(call);
  });
}

// Ends it.
std::pair<std::set<std::string>, std::set<std::string>> seam_calls_by_gil() {
  set_seam_hook(nullptr);
  const auto calls = std::exchange(calls_by_gil, nullptr);
  return {calls->with_gil, calls->without_gil};
}

// torch.cuda.Stream.wait_stream: a call that a program makes between operators.
void make_stream_wait_stream(StreamId waiter, StreamId waited) {
  world_of_tests().end_operators();
  world_of_tests().wait(waiter, world_of_tests().record(waited));
}

void set_current_stream(StreamId stream) {
  world_of_tests().end_operators();
  world_of_tests().set_current_stream(stream);
}

// Memory with one holder, as a storage has it.
struct Block {
  Memory memory;

  explicit Block(Memory taken) : memory(std::move(taken)) {}
  uint64_t address() const { return memory ? reinterpret_cast<uint64_t>(memory.data()) : 0; }
  void free() { memory = Memory(); }
};

// The seam, called as the engine would call it; a slot is the address of host memory.
struct Seam {
  const Backend backend;

  Slot slot(uint64_t address, uint64_t nbytes) const { return {{0, 0, nbytes}, reinterpret_cast<std::byte*>(address)}; }
};

using PointTuple = std::pair<StreamId, uint64_t>;
Point point_of(const PointTuple& point) { return {point.first, point.second}; }

void bind_seam(py::module_& m) {
  py::class_<Block>(m, "Block").def_property_readonly("address", &Block::address).def("free", &Block::free);
  m.def("allocate", [](size_t nbytes) { return Block(make_memory(c10::GetCPUAllocator()->allocate(nbytes), nbytes)); });

  py::class_<Seam>(m, "Seam")
      .def(py::init([](int device) { return Seam{simulated_backend(device)}; }), py::arg("device") = 0)
      .def_property_readonly("current_stream", [](Seam& seam) { return seam.backend.streams.current_stream(); })
      .def_property_readonly("offload_stream", [](Seam& seam) { return seam.backend.streams.offload_stream(); })
      .def_property_readonly("reload_stream", [](Seam& seam) { return seam.backend.streams.reload_stream(); })
      .def("record",
           [](Seam& seam, StreamId stream) {
             const Point point = seam.backend.streams.record(stream);
             return PointTuple(point.stream, point.serial);
           })
      .def("wait",
           [](Seam& seam, StreamId waiter, PointTuple point) { seam.backend.streams.wait(waiter, point_of(point)); })
      .def("allocate",
           [](Seam& seam, uint64_t nbytes, uint64_t address_modulo) {
             return Block(seam.backend.memory.allocate(nbytes, address_modulo));
           })
      .def("copy_out",
           [](Seam& seam, uint64_t slot, uint64_t source, uint64_t nbytes, StreamId stream) {
             seam.backend.link.copy_out(seam.slot(slot, nbytes), reinterpret_cast<const void*>(source), nbytes, stream);
           })
      .def("copy_in",
           [](Seam& seam, uint64_t target, uint64_t slot, uint64_t nbytes, StreamId stream) {
             seam.backend.link.copy_in(reinterpret_cast<void*>(target), seam.slot(slot, nbytes), nbytes, stream);
           })
      .def("note_use",
           [](Seam& seam, Block& block, StreamId stream) { seam.backend.memory.note_use(block.memory.ref(), stream); })
      .def("synchronize", [](Seam& seam, PointTuple point) { seam.backend.streams.synchronize(point_of(point)); })
      .def("status", [](Seam& seam, PointTuple point) { seam.backend.streams.status(point_of(point)); })
      .def("saw_pack",
           [](Seam& seam, uint64_t address, uint64_t nbytes, StreamId stream, uint64_t number) {
             seam.backend.observer.saw_pack(reinterpret_cast<const void*>(address), nbytes, stream, number);
           })
      .def("saw_unpack",
           [](Seam& seam, uint64_t address, uint64_t nbytes, StreamId stream) {
             seam.backend.observer.saw_unpack(reinterpret_cast<const void*>(address), nbytes, stream);
           })
      .def("saw_operators_end", [](Seam& seam) { seam.backend.observer.saw_operators_end(); });

  m.def("set_sequence_number", [](std::optional<uint64_t> number) { scripted_sequence_number = number; });
  m.def("register_host_memory",
        [](uint64_t address, uint64_t nbytes) { simulated_register(reinterpret_cast<void*>(address), nbytes); });
  m.def("unregister_host_memory", [](uint64_t address) {
    const std::string refusal = simulated_unregister(reinterpret_cast<void*>(address));
    if (!refusal.empty()) throw std::invalid_argument(refusal);
  });
}

}  // namespace

void bind_simulated_testing(py::module_& m) {
  py::register_exception<RaceError>(m, "RaceError", PyExc_RuntimeError);

  m.def("start_simulation", &start);
  m.def("stop_simulation", &stop_simulation);
  m.def("simulation_is_running", [] { return active_simulation() != nullptr; });
  m.def("races", [] { return world_of_tests().races(); });
  m.def("clear_races", [] { world_of_tests().clear_races(); });
  m.def("allocated_bytes", [](int device) { return world_of_tests().allocated_bytes(device); });
  m.def("peak_bytes", [](int device) { return world_of_tests().peak_bytes(device); });
  m.def("take_peak_bytes", [](int device) { return world_of_tests().take_peak_bytes(device); });
  m.def("queued_count", [] { return world_of_tests().queued_count(); });
  m.def("access_count", [] { return world_of_tests().access_count(); });
  m.def("device_index_of",
        [](uint64_t address) { return world_of_tests().device_index_of(reinterpret_cast<const void*>(address)); });

  m.def("fill", [](uint64_t address, uint64_t nbytes, StreamId stream) {
    world_of_tests().fill(reinterpret_cast<const void*>(address), nbytes, stream);
  });
  m.def("set_tells_origins", [](bool tells) { world_of_tests().set_tells_origins(tells); });
  m.def("make_compute_stream", [](int device) { return world_of_tests().make_compute_stream(device); });
  m.def("make_external_stream", [](int device) { return world_of_tests().make_external_stream(device); });
  m.def("destroy_stream", [](StreamId stream) { world_of_tests().destroy_stream(stream); });
  m.def("current_stream", [](int device) { return world_of_tests().current_stream(device); });
  m.def("set_current_stream", &set_current_stream);
  m.def("current_device", [] { return world_of_tests().current_device(); });
  m.def("set_current_device", [](int device) { world_of_tests().set_current_device(device); });
  m.def("make_stream_wait_stream", &make_stream_wait_stream);

  m.def("set_allocation_hook", &set_allocation_hook, py::arg("hook").none(true));

  m.def("set_seam_hook", &set_seam_hook, py::arg("hook").none(true));
  m.def("watch_gil_at_seam", &watch_gil_at_seam);
  m.def("seam_calls_by_gil", &seam_calls_by_gil);
  m.def("fail_seam_calls", &fail_seam_calls);
  m.def("clear_seam_faults", &clear_seam_faults);

  m.def("refuse_registration", &refuse_registration);
  m.def("refuse_plain_memory", [](bool refuses) { simulated_arena().refuse_plain_memory(refuses); });
  m.def("refuse_allocation", &refuse_allocation);
  m.def("limit_device_memory", &limit_device_memory, py::arg("limit_bytes").none(true));

  m.def("set_link", [](int device, double bytes_per_s) { simulated_device(device).set_link(bytes_per_s); });
  m.def("advance", [](int device, double seconds) { simulated_device(device).advance(seconds); });
  m.def("start_seam_log", [] { SeamLog::instance().start(); });
  m.def("stop_seam_log", [] { SeamLog::instance().stop(); });
  m.def("seam_log", [] { return SeamLog::instance().lines(); });

  m.def("set_mutant", &set_mutant, py::arg("name").none(true));
  m.def("mutant_names", &mutant_names);
  m.def("mutant_in_force", []() -> std::optional<std::string> {
    if (mutant_in_force == Mutant::kCount) return std::nullopt;
    return mutant_name(mutant_in_force);
  });

  bind_seam(m);
}

}  // namespace torchoffload
