// SpillPlace: the spilling of slots of one kind of device to disks: a TieredStore, and a backend for each device.
// Ownership:     the store and the backends. The arena outlives it.
// Thread safety: needs the GIL, but for trim() and the destructor.
// Failures:      the constructor throws std::runtime_error if no spill file can be made in a directory.
// Shutdown:      see DiskPlaces.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/places.h"
#include "storage/pinned_arena.h"
#include "storage/tiered_store.h"
#include "system/gil.h"

namespace torchoffload {

// The directories that slots go on to, and the policy that says when.
struct SpillPlan {
  std::span<const std::string> directories;
  SpillPolicy policy;
};

// If the tier is the disk, the bytes pass through at most this much host memory.
inline constexpr uint64_t kPassingBytes = uint64_t{1} << 30;

class SpillPlace final : public DiskPlace {
 public:
  using MakeBackend = std::function<std::shared_ptr<const Backend>(TieredStore& store)>;

  // The place of these directories among `places`, with its backend for a device. The place gets the plan's limit of
  // memory, which is that of the context that saves now. May block.
  static const Backend& find(DiskPlaces& places, const BackendUsers& users, PinnedArena& arena, const SpillPlan& plan,
                             const SpillHooks& hooks, int device_index, const MakeBackend& make) REQUIRES(gil);

  SpillPlace(const DiskKey& key, PinnedArena& arena, const SpillPlan& plan, const SpillHooks& hooks);

  std::vector<const Backend*> backends() const override;
  bool is_idle() const override { return store_.is_idle(); }
  uint64_t trim() override { return store_.trim(); }

 private:
  TieredStore store_;
  std::optional<uint64_t> memory_bytes_;                    // the store's limit
  std::map<int, std::shared_ptr<const Backend>> backends_;  // by device
};

}  // namespace torchoffload
