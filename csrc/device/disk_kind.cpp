// The disk tier as a kind of backend: one backend for each directory that CPU tensors are offloaded to.
#include <c10/core/DeviceType.h>

#include <memory>
#include <vector>

#include "device/backends.h"
#include "device/disk_backend.h"
#include "device/places.h"

namespace torchoffload {

namespace {

class Directory final : public DiskPlace {
 public:
  explicit Directory(const DiskKey& key) : DiskPlace(key), disk_(key.directories.front()), backend_(disk_.parts()) {}

  const Backend& backend() const { return backend_; }
  std::vector<const Backend*> backends() const override { return {&backend_}; }
  bool is_idle() const override { return disk_.is_idle(); }
  uint64_t trim() override { return disk_.trim(); }

 private:
  DiskBackend disk_;
  const Backend backend_;
};

class DiskKind final : public BackendKind {
 public:
  std::string name() const override { return "disk"; }

  const Backend* find(const Place& place, const BackendUsers& users) override REQUIRES(gil) {
    const bool is_cpu = place.device_type == static_cast<int8_t>(c10::DeviceType::CPU);
    if (place.tier != Placement::Disk || !is_cpu) return nullptr;
    // They have a single spill file. If there are several directories, it is in the first.
    const DiskKey key{.directories = place.disk_dirs.first(1), .writes_at_once = true};
    DiskPlace& found = directories_.turn_to(
        key, users, [&]() -> std::shared_ptr<DiskPlace> { return std::make_shared<Directory>(key); });
    return &static_cast<Directory&>(found).backend();
  }

  uint64_t trim(const BackendUsers& users) override REQUIRES(gil) { return directories_.trim(users); }

 private:
  DiskPlaces directories_;
};

const RegisterBackendKind disk_is_registered(*new DiskKind);

}  // namespace

}  // namespace torchoffload
