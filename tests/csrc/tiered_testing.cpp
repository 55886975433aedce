// tiered_testing: the store of host memory and disks, as Python tests it, and the plan by which all contexts spill.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "counting_driver.h"
#include "device/backends.h"
#include "storage/tiered_store.h"
#include "testing/sim_transfers.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

using NoGilCall = py::call_guard<py::gil_scoped_release>;
using PointOf = std::pair<StreamId, uint64_t>;

SimTransfers* last_made_transfers = nullptr;
std::atomic<double> now_s{0};  // of the stores under test

// A store with an arena of its own. Its transfers run on threads, or one by one when the test says so.
struct TestedStore {
  std::mutex mutex;
  std::vector<PointOf> waited;  // the points that its threads waited for
  std::unique_ptr<PinnedArena> arena;
  std::unique_ptr<TieredStore> store;
  SimTransfers* transfers = nullptr;
  std::atomic<bool> is_device_held{false};  // no point is reached

  void saw_wait(Point point) {
    const std::lock_guard lock(mutex);
    waited.emplace_back(point.stream, point.serial);
  }
};

std::unique_ptr<TestedStore> make_store(const std::vector<std::string>& directories,
                                        std::optional<uint64_t> memory_bytes, bool writes_at_once, bool by_hand) {
  auto made = std::make_unique<TestedStore>();
  const auto saw_wait = [tested = made.get()](Point point) { tested->saw_wait(point); };
  made->arena =
      std::make_unique<PinnedArena>(kCountingDriver, saw_wait, ChunkPolicy{kMiB / 16, kMiB / 4}, uint64_t{1} << 14);
  SpillHooks hooks;
  hooks.wait_for_point = [saw_wait, tested = made.get()](Point point) {
    saw_wait(point);
    while (tested->is_device_held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  };
  hooks.now_s = [] { return now_s.load(); };
  if (by_hand) {
    hooks.make_transfers = [](size_t, const RunTransfer& run) -> std::unique_ptr<TransferQueue> {
      auto transfers = std::make_unique<SimTransfers>(run);
      transfers->run_when_waited_for();
      last_made_transfers = transfers.get();
      return transfers;
    };
  }
  made->store = std::make_unique<TieredStore>(*made->arena, directories, SpillPolicy{memory_bytes, writes_at_once},
                                              std::move(hooks));
  if (by_hand) made->transfers = last_made_transfers;
  return made;
}

std::optional<Slot> acquire_slot(TestedStore& tested, uint64_t nbytes, int value, bool may_wait) {
  std::vector<Point> guards;
  std::optional<Slot> slot = tested.store->try_acquire(nbytes, guards);
  while (!slot && may_wait) {
    tested.store->grow(nbytes);
    slot = tested.store->try_acquire(nbytes, guards);
  }
  if (slot) std::memset(slot->address, value, nbytes);
  return slot;
}

py::bytes slot_bytes_at(uintptr_t address, uint64_t nbytes) {
  return {reinterpret_cast<const char*>(address), static_cast<size_t>(nbytes)};
}

std::optional<Point> to_point(const std::optional<PointOf>& point) {
  return point ? std::optional(Point{point->first, point->second}) : std::nullopt;
}

}  // namespace

void bind_tiered_testing(py::module_& m) {
  using Self = TestedStore;
  py::class_<Self>(m, "TieredStore")
      .def(py::init(&make_store), py::arg("directories"), py::kw_only(), py::arg("memory_bytes") = std::nullopt,
           py::arg("writes_at_once") = false, py::arg("by_hand") = true)
      // Acquires a slot and fills it with `value`.
      .def("acquire", &acquire_slot, py::arg("nbytes"), py::arg("value"), py::kw_only(), py::arg("may_wait") = true,
           NoGilCall())
      .def(
          "grow", [](Self& self, uint64_t nbytes) { self.store->grow(nbytes); }, NoGilCall())
      .def("grow_awaits_disk", [](Self& self, uint64_t nbytes) { return self.store->grow_awaits_disk(nbytes); })
      .def(
          "note_filled",
          [](Self& self, const Slot& slot, PointOf end) { self.store->note_filled(slot, {end.first, end.second}); },
          NoGilCall())
      .def(
          "release",
          [](Self& self, const Slot& slot, const std::vector<PointOf>& guards) {
            std::vector<Point> points;
            for (const auto& [stream, serial] : guards) points.push_back({stream, serial});
            self.store->release(slot, points);
          },
          py::arg("slot"), py::arg("guards") = std::vector<PointOf>(), NoGilCall())
      .def("is_here", [](Self& self, const Slot& slot) { return self.store->is_here(slot); })
      .def(
          "try_hold", [](Self& self, const Slot& slot) { return self.store->try_hold(slot); }, NoGilCall())
      .def(
          "hold", [](Self& self, const Slot& slot) { return self.store->hold(slot); }, NoGilCall())
      .def(
          "release_hold",
          [](Self& self, const Slot& slot, const std::optional<PointOf>& until) {
            self.store->release_hold(slot, to_point(until));
          },
          py::arg("slot"), py::arg("until") = std::nullopt, NoGilCall())
      .def(
          "begin_fetch", [](Self& self, const Slot& slot) { return self.store->begin_fetch(slot); }, NoGilCall())
      .def(
          "trim", [](Self& self) { return self.store->trim(); }, NoGilCall())
      .def(
          "stop", [](Self& self) { self.store->stop(); }, NoGilCall())
      .def("hold_device", [](Self& self) { self.is_device_held = true; })
      .def("limit_memory", [](Self& self, std::optional<uint64_t> nbytes) { self.store->limit_memory(nbytes); })
      .def_property_readonly("is_idle", [](Self& self) { return self.store->is_idle(); })
      .def("take_trouble", [](Self& self) { return self.store->take_trouble(); })
      .def("check_invariants", [](Self& self) { self.store->check_invariants(); })
      // Of a store whose transfers run by hand: runs the next one. Returns whether there was one.
      .def(
          "run_next", [](Self& self) { return self.transfers->run_next(); }, NoGilCall())
      .def_property_readonly("memory_bytes", [](Self& self) { return self.store->used_bytes(); })
      .def_property_readonly("limit_bytes", [](Self& self) { return self.store->limit_bytes(); })
      .def_property_readonly("disk_bytes", [](Self& self) { return self.store->disk_used_bytes(); })
      .def_property_readonly("arena_bytes", [](Self& self) { return self.arena->capacity_bytes(); })
      .def_property_readonly("waited", [](Self& self) {
        const std::lock_guard lock(self.mutex);
        return self.waited;
      });
  m.def("advance_clock_of_stores", [](double seconds) { now_s = now_s + seconds; });
  m.def("bytes_at", slot_bytes_at);
  m.def("spill_memory_bytes", spill_memory_bytes);
  m.def("set_transfers_wait", set_transfers_wait);
  m.def("set_disk_threads", set_disk_threads);
  m.def(
      "spill_everything",
      [](const std::optional<std::string>& directory, uint64_t memory_bytes, bool writes_at_once) {
        if (!directory) return forget_spill_plan();
        set_spill_plan({*directory}, {memory_bytes, writes_at_once});
      },
      py::arg("directory").none(true), py::kw_only(), py::arg("memory_bytes") = 0, py::arg("writes_at_once") = true);
}

}  // namespace torchoffload
