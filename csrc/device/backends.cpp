#include "device/backends.h"

#include <algorithm>

namespace torchoffload {

namespace {

// Filled while the module is loaded, by files in any order.
std::vector<BackendKind*>& kinds() {
  static auto* const leaked = new std::vector<BackendKind*>;
  return *leaked;
}

std::optional<SpillPlan>& spill_plan_of_tests() {
  static auto* const leaked = new std::optional<SpillPlan>;
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

void make_coders() {
  for (BackendKind* const kind : kinds()) kind->make_coders();
}

std::vector<Coder*> all_coders() {
  std::vector<Coder*> all;
  for (const BackendKind* const kind : kinds()) {
    for (Coder* const coder : kind->coders()) all.push_back(coder);
  }
  return all;
}

uint64_t trim_backends(const BackendUsers& users) {
  uint64_t given_back_bytes = 0;
  for (BackendKind* const kind : kinds()) given_back_bytes += kind->trim(users);
  return given_back_bytes;
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

GraphPools* graph_pools() {
  for (BackendKind* const kind : kinds()) {
    if (GraphPools* const pools = kind->graph_pools()) return pools;
  }
  return nullptr;
}

std::optional<SpillPlan> spill_plan(const Place& place) {
  const auto directories = [&] { return std::vector<std::string>(place.disk_dirs.begin(), place.disk_dirs.end()); };
  if (place.tier == Placement::Disk) return SpillPlan{directories(), {kPassingBytes, /*writes_at_once=*/true}};
  if (place.spills) return SpillPlan{directories(), {place.budget_bytes, /*writes_at_once=*/false}};
  if (spill_plan_of_tests() && !place.budget_bytes) return spill_plan_of_tests();
  return std::nullopt;
}

void set_spill_plan(std::optional<SpillPlan> plan) { spill_plan_of_tests() = std::move(plan); }

RegisterBackendWrapper::RegisterBackendWrapper(BackendWrapper wrapper) { wrapper_in_use() = wrapper; }

const Backend& wrapped(const Backend& backend, int device_index) {
  return wrapper_in_use() == nullptr ? backend : wrapper_in_use()(backend, device_index);
}

}  // namespace torchoffload
