// DiskPlaces: the sets of directories that backends of one kind move to. Each has files and threads from the system.
// Ownership:     shares its places with the backends' users, who destroy one that was dropped once nothing refers to
//                it.
// Thread safety: needs the GIL, which turn_to() and trim() release while they wait.
// Failures:      turn_to() passes on the exceptions of `make`.
// Shutdown:      leaked on purpose; see Note [No CUDA after main].
//
// Note [Directories that are left]
// A program may use one directory for ever, some of them in turn, or a new one for each step. So of the places without
// a user now, the two used last keep their files and threads, and further ones are remembered with the facts learned
// there. One whose directories were deleted is remembered only while a context still uses its facts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/backend.h"
#include "system/gil.h"
#include "system/process.h"

namespace torchoffload {

class BackendUsers;

// Contexts with equal keys share a place.
struct DiskKey {
  std::span<const std::string> directories;
  const SlotStore* memory = nullptr;  // holds slots before they go on to a disk; null: they are on the disk at once
  bool writes_at_once = false;
};

class DiskPlace {
 public:
  explicit DiskPlace(const DiskKey& key)
      : directories_(key.directories.begin(), key.directories.end()),
        memory_(key.memory),
        writes_at_once_(key.writes_at_once) {}
  // Waits for the copies of the place, and ends its threads: without the GIL.
  virtual ~DiskPlace() = default;
  DiskPlace(const DiskPlace&) = delete;
  DiskPlace& operator=(const DiskPlace&) = delete;

  // Is it the place of these directories, in this process? See Note [Forked children].
  bool is_of(const DiskKey& key) const;
  bool has_directories() const;  // they were not deleted

  virtual std::vector<const Backend*> backends() const = 0;

  // Is no slot in use, and no copy on its way? False in a forked child of the process that made the place.
  virtual bool is_idle() const = 0;

  // Releases the space on the disk, the files and the threads that nothing uses. The next copy makes them anew. Returns
  // the bytes of disk released. May block.
  virtual uint64_t trim() EXCLUDES(gil) = 0;

 private:
  friend class DiskPlaces;
  const std::vector<std::string> directories_;
  const SlotStore* const memory_;
  const bool writes_at_once_;
  const ForkGuard fork_guard_;
  bool was_trimmed_ = false;  // since it was turned to
};

class DiskPlaces {
 public:
  // The place of these directories; the first time, the one that `make` returns. May block if it is another one than
  // before: the places that are left are trimmed or dropped.
  DiskPlace& turn_to(const DiskKey& key, const BackendUsers& users,
                     const std::function<std::shared_ptr<DiskPlace>()>& make) REQUIRES(gil);

  // Trims all places. Returns the bytes released. May block.
  uint64_t trim(const BackendUsers& users) REQUIRES(gil);

 private:
  // Trims or drops the places that are left.
  void tidy(const BackendUsers& users) REQUIRES(gil);

  std::vector<std::shared_ptr<DiskPlace>> places_ GUARDED_BY(gil);  // the latest used first
};

}  // namespace torchoffload
