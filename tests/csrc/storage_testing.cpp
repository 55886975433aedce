// storage_testing: the storage floor and the disk backend, as far as Python tests them. Points are (stream, serial).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/range_allocator.h"
#include "counting_driver.h"
#include "device/backends.h"
#include "device/disk_backend.h"
#include "storage/pinned_arena.h"
#include "storage/spill_file.h"
#include "system/file_io.h"
#include "system/host_memory.h"
#include "system/local_world.h"
#include "system/numa.h"

namespace py = pybind11;

namespace torchoffload {
namespace {

using PointTuple = std::pair<StreamId, uint64_t>;
using NoGil = py::call_guard<py::gil_scoped_release>;

std::vector<Point> to_points(const std::vector<PointTuple>& tuples) {
  std::vector<Point> points;
  for (const auto& [stream, serial] : tuples) points.push_back({stream, serial});
  return points;
}

std::vector<PointTuple> to_tuples(const std::vector<Point>& points) {
  std::vector<PointTuple> tuples;
  for (const Point& point : points) tuples.emplace_back(point.stream, point.serial);
  return tuples;
}

// One system call of the disk tier gone wrong, for `times` calls after the first `after`.
struct Fault {
  std::atomic<int> error{0};
  std::atomic<int64_t> after{0};
  std::atomic<int64_t> times{0};
  std::atomic<uint64_t> max_bytes{UINT64_MAX};  // more is cut short, whatever `after` and `times` say
  std::atomic<int64_t> delay_us{0};
  std::atomic<uint64_t> call_count{0};
  std::atomic<bool> holds_next{false};  // the next call waits until `is_released`
  std::atomic<bool> is_released{false};

  // Sets errno and returns true if this call is to fail.
  bool strikes() {
    call_count.fetch_add(1);
    if (holds_next.exchange(false)) is_released.wait(false);
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    if (error == 0 || after.fetch_sub(1) > 0 || times.fetch_sub(1) <= 0) return false;
    errno = error;
    return true;
  }
  void clear() {
    error = 0;
    after = times = delay_us = 0;
    max_bytes = UINT64_MAX;
    call_count = 0;
  }
};

Fault pread_fault, pwrite_fault, reserve_fault, punch_hole_fault, write_back_fault;

Fault& fault_of(const std::string& call) {
  static const std::map<std::string, Fault*> faults{{"pread", &pread_fault},
                                                    {"pwrite", &pwrite_fault},
                                                    {"reserve", &reserve_fault},
                                                    {"punch_hole", &punch_hole_fault},
                                                    {"write_back", &write_back_fault}};
  return *faults.at(call);
}

ssize_t faulty_pread(int fd, void* buffer, size_t nbytes, off_t offset) {
  if (pread_fault.strikes()) return -1;
  return kSystemCalls.pread(fd, buffer, std::min<size_t>(nbytes, pread_fault.max_bytes), offset);
}
ssize_t faulty_pwrite(int fd, const void* buffer, size_t nbytes, off_t offset) {
  if (pwrite_fault.strikes()) return -1;
  return kSystemCalls.pwrite(fd, buffer, std::min<size_t>(nbytes, pwrite_fault.max_bytes), offset);
}
int faulty_reserve(int fd, off_t offset, off_t nbytes) {
  if (static_cast<uint64_t>(nbytes) > reserve_fault.max_bytes) return ENOSPC;
  return reserve_fault.strikes() ? errno : kSystemCalls.reserve(fd, offset, nbytes);
}
int faulty_punch_hole(int fd, off_t offset, off_t nbytes) {
  return punch_hole_fault.strikes() ? -1 : kSystemCalls.punch_hole(fd, offset, nbytes);
}
int faulty_write_back(int fd, off_t offset, off_t nbytes, int flags) {
  return write_back_fault.strikes() ? -1 : kSystemCalls.write_back(fd, offset, nbytes, flags);
}

void inject_io_fault(const std::string& call, int error, int64_t after, int64_t times, uint64_t max_bytes,
                     int64_t delay_us) {
  Fault& fault = fault_of(call);
  fault.clear();
  fault.error = error;
  fault.after = after;
  fault.times = times;
  fault.max_bytes = max_bytes;
  fault.delay_us = delay_us;
}

void hold_next_io(const std::string& call) {
  Fault& fault = fault_of(call);
  fault.is_released = false;
  fault.holds_next = true;
}

void release_held_io(const std::string& call) {
  Fault& fault = fault_of(call);
  fault.holds_next = false;
  fault.is_released = true;
  fault.is_released.notify_all();
}

void clear_io_faults() {
  for (Fault* fault : {&pread_fault, &pwrite_fault, &reserve_fault, &punch_hole_fault, &write_back_fault})
    fault->clear();
}

HostRegistration registration_of(const std::string& name) {
  if (name == "counting") return kCountingDriver;
  const BackendKind* const kind = find_backend_kind(name);
  return kind != nullptr ? kind->host_registration() : HostRegistration{};
}

// A store, and the points that its trim() waited for.
template <typename Store>
struct Watched {
  std::vector<Point> waited;
  std::unique_ptr<Store> store;
};
using WatchedArena = Watched<PinnedArena>;
using WatchedFile = Watched<SpillFile>;

template <typename Store>
py::class_<Watched<Store>> bind_store(py::module_& m, const char* name) {
  using Self = Watched<Store>;
  py::class_<Self> cls(m, name);
  cls.def(
      "try_acquire",
      [](Self& self, uint64_t nbytes) -> std::optional<std::pair<Slot, std::vector<PointTuple>>> {
        std::vector<Point> guards;
        const auto slot = self.store->try_acquire(nbytes, guards);
        if (!slot) return std::nullopt;
        return std::pair(*slot, to_tuples(guards));
      },
      py::arg("nbytes"));
  cls.def("grow", [](Self& self, uint64_t nbytes) { self.store->grow(nbytes); }, NoGil());
  cls.def(
      "release",
      [](Self& self, const Slot& slot, const std::vector<PointTuple>& guards) {
        self.store->release(slot, to_points(guards));
      },
      py::arg("slot"), py::arg("guards") = std::vector<PointTuple>());
  cls.def("trim", [](Self& self) { return self.store->trim(); }, NoGil());
  cls.def("check_invariants", [](Self& self) { self.store->check_invariants(); });
  cls.def_property_readonly("capacity_bytes", [](Self& self) { return self.store->capacity_bytes(); });
  cls.def_property_readonly("used_bytes", [](Self& self) { return self.store->used_bytes(); });
  cls.def_property_readonly("grow_count", [](Self& self) { return self.store->grow_count(); });
  cls.def_property_readonly("waited", [](Self& self) { return to_tuples(self.waited); });
  return cls;
}

void bind_range_allocator(py::module_& m) {
  using RangeTuple = std::tuple<BlockId, uint64_t, uint64_t>;
  py::class_<RangeAllocator>(m, "RangeAllocator")
      .def(py::init<uint64_t>(), py::arg("granularity_bytes") = kAlignmentBytes)
      .def("add_block", &RangeAllocator::add_block)
      .def("try_acquire",
           [](RangeAllocator& self, uint64_t nbytes) -> std::optional<std::pair<RangeTuple, std::vector<PointTuple>>> {
             std::vector<Point> guards;
             const auto range = self.try_acquire(nbytes, guards);
             if (!range) return std::nullopt;
             return std::pair(RangeTuple(range->block, range->offset, range->nbytes), to_tuples(guards));
           })
      .def("release",
           [](RangeAllocator& self, const RangeTuple& range, const std::vector<PointTuple>& guards) {
             self.release({std::get<0>(range), std::get<1>(range), std::get<2>(range)}, to_points(guards));
           })
      .def("idle_blocks",
           [](const RangeAllocator& self) {
             std::vector<std::pair<BlockId, std::vector<PointTuple>>> idle;
             for (const auto& [block, guards] : self.idle_blocks()) idle.emplace_back(block, to_tuples(guards));
             return idle;
           })
      .def("remove_block", &RangeAllocator::remove_block)
      .def("check_invariants", &RangeAllocator::check_invariants)
      .def_property_readonly("capacity_bytes", &RangeAllocator::capacity_bytes)
      .def_property_readonly("used_bytes", &RangeAllocator::used_bytes)
      .def_property_readonly("free_bytes", &RangeAllocator::free_bytes)
      .def_property_readonly("largest_free_bytes", &RangeAllocator::largest_free_bytes);
}

void bind_stores(py::module_& m) {
  py::register_local_exception<StoreFull>(m, "StoreFull", PyExc_RuntimeError);
  py::class_<Slot>(m, "Slot")
      .def_property_readonly("block", [](const Slot& self) { return self.range.block; })
      .def_property_readonly("offset", [](const Slot& self) { return self.range.offset; })
      .def_property_readonly("nbytes", &Slot::nbytes)
      .def_property_readonly("address", [](const Slot& self) { return reinterpret_cast<uintptr_t>(self.address); });

  using Arena = WatchedArena;
  bind_store<PinnedArena>(m, "PinnedArena")
      .def(py::init([](const std::string& driver_name, uint64_t min_chunk_bytes, uint64_t max_chunk_bytes,
                       uint64_t page_bytes) {
             auto self = std::make_unique<Arena>();
             self->store = std::make_unique<PinnedArena>(
                 registration_of(driver_name),
                 [watched = self.get()](Point point) { watched->waited.push_back(point); },
                 ChunkPolicy{min_chunk_bytes, max_chunk_bytes}, page_bytes);
             return self;
           }),
           py::kw_only(), py::arg("driver") = "", py::arg("min_chunk_bytes") = 2 * kMiB,
           py::arg("max_chunk_bytes") = 8 * kMiB, py::arg("page_bytes") = kHugePageBytes)
      .def("grow_ahead", [](Arena& self, uint64_t limit_bytes) { self.store->grow_ahead(limit_bytes); })
      .def("reserve", [](Arena& self, uint64_t capacity_bytes) { self.store->reserve(capacity_bytes); })
      .def(
          "grow_on_need", [](Arena& self) { self.store->grow_on_need(); }, NoGil())
      .def("take_peak_bytes", [](Arena& self) { return self.store->take_peak_bytes(); })
      .def(
          "shrink", [](Arena& self, uint64_t needed_bytes) { return self.store->shrink(needed_bytes); }, NoGil())
      .def(
          "stop", [](Arena& self) { self.store->stop(); }, NoGil())
      .def("refuse_plain_memory", [](Arena& self, bool refuses) { self.store->refuse_plain_memory(refuses); })
      .def("take_trouble", [](Arena& self) { return self.store->take_trouble(); })
      .def_property_readonly("is_growing", [](Arena& self) { return self.store->is_growing(); });
  m.def("registered_bytes", [] { return counting_driver().registered_bytes(); });
  m.def("driver_refuses", [](bool refuses) { counting_driver().set(&CountingDriver::refuses, refuses); });
  m.def("hold_driver", [](bool is_held) { counting_driver().set(&CountingDriver::is_held, is_held); });
  m.def("driver_call_count", [] { return counting_driver().get(&CountingDriver::call_count); });
  m.def("driver_waiting_count", [] { return counting_driver().get(&CountingDriver::waiting_count); });

  bind_store<SpillFile>(m, "SpillFile")
      .def(py::init([](const std::string& directory, uint64_t min_chunk_bytes, uint64_t max_chunk_bytes) {
             auto self = std::make_unique<WatchedFile>();
             self->store = std::make_unique<SpillFile>(
                 directory, [watched = self.get()](Point point) { watched->waited.push_back(point); },
                 ChunkPolicy{min_chunk_bytes, max_chunk_bytes});
             return self;
           }),
           py::arg("directory"), py::kw_only(), py::arg("min_chunk_bytes") = kMiB,
           py::arg("max_chunk_bytes") = 4 * kMiB)
      .def("write",
           [](WatchedFile& self, const Slot& slot, const py::bytes& source) {
             const auto bytes = static_cast<std::string_view>(source);
             py::gil_scoped_release no_gil;
             return self.store->write(slot, bytes.data(), bytes.size());
           })
      .def("read",
           [](WatchedFile& self, const Slot& slot, uint64_t nbytes) {
             std::string target(nbytes, '\xff');
             std::string failure;
             {
               py::gil_scoped_release no_gil;
               failure = self.store->read(target.data(), slot, nbytes);
             }
             return std::pair(py::bytes(target), failure);
           })
      .def_property_readonly("uses_direct_io", [](WatchedFile& self) { return self.store->uses_direct_io(); });

  io_calls = IoCalls{faulty_pread, faulty_pwrite, faulty_reserve, faulty_punch_hole, faulty_write_back};
  m.def("inject_io_fault", inject_io_fault, py::arg("call"), py::kw_only(), py::arg("errno") = 0, py::arg("after") = 0,
        py::arg("times") = INT64_MAX, py::arg("max_bytes") = UINT64_MAX, py::arg("delay_us") = 0,
        "Makes `call` of the disk tier fail with errno `times` times after the first `after`, fall short, or be slow.");
  m.def("clear_io_faults", clear_io_faults);
  m.def("hold_next_io", hold_next_io, py::arg("call"),
        "Makes the next `call` of the disk tier wait for release_held_io().");
  m.def("release_held_io", release_held_io, py::arg("call"));
  m.def("io_call_count", [](const std::string& call) { return fault_of(call).call_count.load(); });
}

void bind_host_memory(py::module_& m) {
  py::class_<HostMemory>(m, "HostMemory")
      .def(py::init<>())
      .def_readwrite("total_bytes", &HostMemory::total_bytes)
      .def_readwrite("available_bytes", &HostMemory::available_bytes)
      .def_readwrite("limit_bytes", &HostMemory::limit_bytes)
      .def_readwrite("limit_used_bytes", &HostMemory::limit_used_bytes)
      .def_readwrite("limit_inactive_file_bytes", &HostMemory::limit_inactive_file_bytes);
  m.def("read_host_memory", read_host_memory, py::arg("root") = "/");
  m.def("default_budget_bytes", default_budget_bytes, py::arg("memory"), py::arg("local_world_size") = 1,
        py::arg("held_bytes") = 0);
  m.def("local_world_size", [](const std::map<std::string, std::string>& variables) {
    return local_world_size([&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  });
  m.def("local_world_size", [] { return local_world_size(); });
  m.def("parse_tasks_per_node", parse_tasks_per_node, py::arg("text"), py::arg("node") = std::nullopt);
  m.def("parse_field", parse_field);
  m.def("parse_limit", parse_limit);
  const auto listed = [](const std::optional<cpu_set_t>& cpus) -> py::object {
    if (!cpus) return py::none();
    std::vector<size_t> numbers;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &*cpus)) numbers.push_back(cpu);
    }
    return py::cast(numbers);
  };
  m.def("parse_cpu_list", [=](const std::string& text) { return listed(parse_cpu_list(text)); });
  m.def(
      "cpus_of_node", [=](int node, const std::string& root) { return listed(cpus_of_node(node, root)); },
      py::arg("node"), py::arg("root") = "/");
  m.def("node_of_pci_device", node_of_pci_device, py::arg("address"), py::arg("root") = "/");
  m.def("prefer_node", [](uintptr_t address, uint64_t nbytes, int node) {
    return prefer_node(reinterpret_cast<void*>(address), nbytes, node);
  });
  m.def("parse_group", [](const std::string& text, int version) {
    return parse_group(text, version == 1 ? CgroupVersion::One : CgroupVersion::Two);
  });
  m.def("parse_mountinfo", [](const std::string& text) {
    std::vector<std::tuple<int, std::string, std::string>> mounts;
    for (const CgroupMount& mount : parse_mountinfo(text)) {
      mounts.emplace_back(mount.version == CgroupVersion::One ? 1 : 2, mount.mount_point, mount.root);
    }
    return mounts;
  });
}

void bind_disk_backend(py::module_& m) {
  using Self = DiskBackend;
  py::class_<Memory>(m, "DeviceMemory").def_property_readonly("address", [](const Memory& self) {
    return reinterpret_cast<uintptr_t>(self.data());
  });
  py::class_<Self>(m, "DiskBackend")
      .def(py::init([](std::string directory, unsigned thread_count) {
             return std::make_unique<Self>(std::move(directory),
                                           DiskBackendOptions{thread_count, thread_count, ChunkPolicy{kMiB, 4 * kMiB}});
           }),
           py::arg("directory"), py::kw_only(), py::arg("thread_count") = 2)
      .def_property_readonly("host", &Self::current_stream)
      .def_property_readonly("offload_stream", &Self::offload_stream)
      .def_property_readonly("reload_stream", &Self::reload_stream)
      .def("acquire",
           [](Self& self, uint64_t nbytes) {
             std::vector<Point> guards;
             self.store().grow(nbytes);
             const Slot slot = self.store().try_acquire(nbytes, guards).value();
             return std::pair(slot, to_tuples(guards));
           })
      .def("release", [](Self& self, const Slot& slot,
                         const std::vector<PointTuple>& guards) { self.store().release(slot, to_points(guards)); })
      .def(
          "trim", [](Self& self) { return self.store().trim(); }, NoGil())
      .def("record",
           [](Self& self, StreamId stream) {
             const Point point = self.record(stream);
             return PointTuple(point.stream, point.serial);
           })
      .def(
          "wait",
          [](Self& self, StreamId waiter, const PointTuple& point) { self.wait(waiter, {point.first, point.second}); },
          NoGil())
      .def(
          "synchronize", [](Self& self, const PointTuple& point) { self.synchronize({point.first, point.second}); },
          NoGil())
      .def("is_reached",
           [](Self& self, const PointTuple& point) {
             return self.status({point.first, point.second}) == PointStatus::Reached;
           })
      .def("failure", [](Self& self, const PointTuple& point) { return self.failure({point.first, point.second}); })
      .def("forget", [](Self& self, const PointTuple& point) { self.forget({point.first, point.second}); })
      .def("allocate", &Self::allocate, py::arg("nbytes"), py::arg("address_modulo") = 0)
      .def("copy_out",
           [](Self& self, const Slot& slot, uintptr_t source, uint64_t nbytes, StreamId stream) {
             self.copy_out(slot, reinterpret_cast<const void*>(source), nbytes, stream);
           })
      .def("copy_in", [](Self& self, uintptr_t target, const Slot& slot, uint64_t nbytes, StreamId stream) {
        self.copy_in(reinterpret_cast<void*>(target), slot, nbytes, stream);
      });
}

}  // namespace

void bind_storage_testing(py::module_& m) {
  bind_range_allocator(m);
  bind_stores(m);
  bind_host_memory(m);
  bind_disk_backend(m);
}

}  // namespace torchoffload
