#include "device/backends.h"

#include <algorithm>

namespace torchoffload {

namespace {

// Filled while the module is loaded, by files in any order.
std::vector<BackendKind*>& kinds() {
  static auto* const leaked = new std::vector<BackendKind*>;
  return *leaked;
}

struct PlanOfTests {
  std::vector<std::string> directories;
  SpillPolicy policy;
};

std::optional<PlanOfTests>& spill_plan_of_tests() {
  static auto* const leaked = new std::optional<PlanOfTests>;
  return *leaked;
}

BackendWrapper& wrapper_in_use() {
  static BackendWrapper known = nullptr;
  return known;
}

}  // namespace

RegisterBackendKind::RegisterBackendKind(BackendKind& kind) { kinds().push_back(&kind); }

const Backend* find_backend(const Place& place, const BackendUsers& users) {
  for (BackendKind* const kind : kinds()) {
    if (const Backend* const backend = kind->find(place, users)) return backend;
  }
  return nullptr;
}

BackendKind* find_backend_kind(std::string_view name) {
  const auto found =
      std::find_if(kinds().begin(), kinds().end(), [&](BackendKind* kind) { return kind->name() == name; });
  return found == kinds().end() ? nullptr : *found;
}

bool accelerator_available() {
  return std::any_of(kinds().begin(), kinds().end(), [](const BackendKind* kind) { return kind->is_available(); });
}

void note_entry(Placement tier) {
  for (BackendKind* const kind : kinds()) kind->note_entry(tier);
}

uint64_t trim_backends(const BackendUsers& users) {
  uint64_t released_bytes = 0;
  for (BackendKind* const kind : kinds()) released_bytes += kind->trim(users);
  return released_bytes;
}

PinnedMemory pinned_memory() {
  PinnedMemory all;
  for (const BackendKind* const kind : kinds()) {
    const PinnedMemory of_kind = kind->pinned_memory();
    all.held_bytes += of_kind.held_bytes;
    all.used_bytes += of_kind.used_bytes;
  }
  return all;
}

std::vector<std::string> backend_notes() {
  std::vector<std::string> all;
  for (const BackendKind* const kind : kinds()) {
    for (std::string& note : kind->notes()) all.push_back(std::move(note));
  }
  return all;
}

GraphPools* graph_pools() {
  for (BackendKind* const kind : kinds()) {
    if (GraphPools* const pools = kind->graph_pools()) return pools;
  }
  return nullptr;
}

std::optional<SpillPlan> spill_plan(const Place& place) {
  if (place.tier == Placement::Disk) return SpillPlan{place.disk_dirs, {kPassingBytes, /*writes_at_once=*/true}};
  if (place.spills) return SpillPlan{place.disk_dirs, {place.budget_bytes, /*writes_at_once=*/false}};
  const std::optional<PlanOfTests>& of_tests = spill_plan_of_tests();
  if (of_tests && !place.budget_bytes) return SpillPlan{of_tests->directories, of_tests->policy};
  return std::nullopt;
}

void set_spill_plan(const std::vector<std::string>& directories, SpillPolicy policy) {
  spill_plan_of_tests() = {directories, policy};
}

void forget_spill_plan() { spill_plan_of_tests().reset(); }

RegisterBackendWrapper::RegisterBackendWrapper(BackendWrapper wrapper) { wrapper_in_use() = wrapper; }

std::shared_ptr<const Backend> wrapped(const Backend& backend, int device_index) {
  if (wrapper_in_use() != nullptr) return wrapper_in_use()(backend, device_index);
  return std::make_shared<const Backend>(backend);
}

}  // namespace torchoffload
