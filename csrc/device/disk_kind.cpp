// The disk tier as a kind of backend: one backend for each directory that CPU tensors are offloaded to.
#include <c10/core/DeviceType.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device/backends.h"
#include "device/disk_backend.h"
#include "system/process.h"

namespace torchoffload {

namespace {

// A directory that was offloaded to. Its backend stays, since handles, tapes and copies refer to it; what it has from
// the system, a file and threads, it gives up while it is idle.
struct Directory {
  std::string path;
  uint64_t generation;  // a forked child makes its own: the inherited file is the parent's; see Note [Forked children]
  DiskBackend* disk;
  const Backend* backend;

  bool is_idle(const BackendUsers& users) const { return !users.has_tapes(*backend) && disk->is_idle(); }
};

// Idle directories that keep what they have, for a program that uses some in turn. One that was deleted does not count.
constexpr size_t kDirectoriesKept = 2;

class DiskKind final : public BackendKind {
 public:
  std::string name() const override { return "disk"; }

  const Backend* find(const Place& place, const BackendUsers& users) override {
    if (place.tier != Placement::Disk) return nullptr;
    const bool is_cpu = place.device_type == static_cast<int8_t>(c10::DeviceType::CPU);
    // Their spill file is one file: of several directories it is in the first.
    return is_cpu ? turn_to(place.disk_dirs.front(), users) : nullptr;
  }

  // While this waits, another thread may turn to further directories: it goes through a copy.
  uint64_t trim(const BackendUsers& users) override {
    uint64_t given_back_bytes = 0;
    users.without_gil([&, all = directories_] {
      for (const Directory& directory : all) given_back_bytes += directory.disk->trim();
    });
    return given_back_bytes;
  }

 private:
  const Backend* turn_to(std::string_view path, const BackendUsers& users) {
    const auto is_it = [&](const Directory& each) { return each.path == path && each.generation == fork_generation(); };
    if (!directories_.empty() && is_it(directories_.front())) return directories_.front().backend;
    const auto found = std::find_if(directories_.begin(), directories_.end(), is_it);
    if (found == directories_.end()) {
      auto* const disk = new DiskBackend(std::string(path));
      directories_.insert(directories_.begin(),
                          {std::string(path), fork_generation(), disk, new Backend(disk->parts())});
    } else {
      std::rotate(directories_.begin(), found, found + 1);
    }
    const Backend* const backend = directories_.front().backend;
    if (const std::vector<DiskBackend*> idle = idle_ones(users); !idle.empty()) {
      users.without_gil([&] {
        for (DiskBackend* const disk : idle) disk->trim();
      });
    }
    return backend;
  }

  std::vector<DiskBackend*> idle_ones(const BackendUsers& users) const {
    std::vector<DiskBackend*> idle;
    size_t kept_count = 0;
    for (const Directory& directory : directories_) {
      const bool is_kept = kept_count < kDirectoriesKept && access(directory.path.c_str(), F_OK) == 0;
      if (is_kept) ++kept_count;
      if (!is_kept && directory.disk->store().is_open() && directory.is_idle(users)) idle.push_back(directory.disk);
    }
    return idle;
  }

  std::vector<Directory> directories_;  // the latest used first
};

const RegisterBackendKind disk_is_registered(*new DiskKind);

}  // namespace

}  // namespace torchoffload
