// GrowthModel: a driver that refuses now and then, and what it sees of an arena that grows ahead of need. Each chunk is
// registered once, one at a time, none ahead beyond what was asked for, none at all once stop() has returned, and at
// the end the arena holds what the driver does. What is wrong is kept until the end: an arena's thread has nobody to
// throw to.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver.h"
#include "storage/pinned_chunk.h"
#include "storage_faults.h"

namespace torchoffload::fuzz {

inline constexpr uint64_t kArenaPageBytes = 1 << 16;
inline constexpr uint64_t kMostBytesHeld = 8 * kMiB;   // so that slots are reused all the time
inline constexpr uint64_t kMostAheadBytes = 7 * kMiB;  // no host asks for more ahead of need

inline thread_local bool is_host = false;  // else a thread of an arena

class GrowthModel {
 public:
  void begin() {
    std::lock_guard lock(mutex_);
    seen_ = {};
  }
  void stopped() {
    std::lock_guard lock(mutex_);
    seen_.is_stopped = true;
  }

  std::string register_memory(void* address, size_t nbytes) {
    {
      std::lock_guard lock(mutex_);
      check(!seen_.is_stopped, "a chunk was taken after stop()");
      check(!std::exchange(seen_.is_taking, true), "two chunks were taken at once");
      check(is_host || held_bytes() + nbytes <= kMostAheadBytes, "more was taken ahead than was asked for");
    }
    if (faults().happens(4)) std::this_thread::sleep_for(std::chrono::microseconds(200));
    std::lock_guard lock(mutex_);
    seen_.is_taking = false;
    if (held_bytes() + nbytes > kMostBytesHeld || faults().happens(Faults::Register, 16)) return "planted";
    check(seen_.chunks.emplace(address, nbytes).second, "memory was registered twice");
    if (!is_host) ++seen_.ahead_count;
    return {};
  }

  std::string unregister_memory(void* address) {
    std::lock_guard lock(mutex_);
    check(!seen_.is_stopped, "a chunk was released after stop()");
    const auto chunk = seen_.chunks.extract(address);
    check(!chunk.empty(), "memory was unregistered that was not registered");
    if (!faults().happens(Faults::Unregister, 4)) return {};
    seen_.leaked.emplace_back(chunk.key(), chunk.mapped());
    return "planted";
  }

  // Throws what was wrong. What the driver kept is released here, as are the chunks of an arena that was stopped.
  // `locks_all`: the arena has no plain memory, of which the driver knows nothing.
  void finish(uint64_t capacity_bytes, bool locks_all, Coverage& coverage) {
    std::lock_guard lock(mutex_);
    expect(seen_.wrong == nullptr, seen_.wrong);
    const bool is_same = locks_all ? held_bytes() == capacity_bytes : held_bytes() <= capacity_bytes;
    expect(is_same, "the arena holds other chunks than the driver");
    if (held_bytes() < capacity_bytes) coverage.saw("plain memory");
    for (const auto& [address, nbytes] : seen_.chunks) munmap(address, nbytes);
    for (const auto& [address, nbytes] : seen_.leaked) munmap(address, nbytes);
    if (seen_.ahead_count > 0) coverage.saw("chunk ahead", seen_.ahead_count);
  }

 private:
  void check(bool holds, const char* what) {
    if (!holds) seen_.wrong = what;
  }
  uint64_t held_bytes() const {
    uint64_t held = 0;
    for (const auto& [address, nbytes] : seen_.chunks) held += nbytes;
    return held;
  }

  struct Seen {
    std::map<void*, size_t> chunks;
    std::vector<std::pair<void*, size_t>> leaked;
    uint64_t ahead_count = 0;
    bool is_taking = false;
    bool is_stopped = false;
    const char* wrong = nullptr;
  };
  std::mutex mutex_;
  Seen seen_;  // under the lock
};

inline GrowthModel& growth() {
  static auto* const leaked = new GrowthModel;
  return *leaked;
}

inline const HostRegistration kWatchedDriver{
    [](void* address, size_t nbytes) { return growth().register_memory(address, nbytes); },
    [](void* address) { return growth().unregister_memory(address); }};

}  // namespace torchoffload::fuzz
