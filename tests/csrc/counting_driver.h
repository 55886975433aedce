// counting_driver.h: a driver for arenas under test. It counts, refuses on request, and can be held: then what asks it
// to register memory waits until it is let go.
// Thread safety: everything here, any thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "storage/pinned_chunk.h"

namespace torchoffload {

class CountingDriver {
 public:
  // Each read and set under the lock.
  bool refuses = false;
  bool is_held = false;
  uint64_t call_count = 0;  // of registering, whatever came of it
  uint64_t waiting_count = 0;

  template <typename Value>
  void set(Value CountingDriver::* what, Value value) {
    std::lock_guard lock(mutex_);
    this->*what = value;
    changed_.notify_all();
  }
  template <typename Value>
  Value get(Value CountingDriver::* what) {
    std::lock_guard lock(mutex_);
    return this->*what;
  }
  uint64_t registered_bytes() {
    std::lock_guard lock(mutex_);
    uint64_t nbytes = 0;
    for (const auto& [address, chunk_bytes] : registered_) nbytes += chunk_bytes;
    return nbytes;
  }

  std::string register_memory(void* address, size_t nbytes) {
    std::unique_lock lock(mutex_);
    ++call_count;
    ++waiting_count;
    changed_.wait(lock, [&] { return !is_held; });
    --waiting_count;
    if (refuses) return "out of pinnable memory";
    registered_.emplace(address, nbytes);
    return {};
  }
  std::string unregister_memory(void* address) {
    std::lock_guard lock(mutex_);
    if (refuses) return "the driver is busy";
    registered_.erase(address);
    return {};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<void*, size_t> registered_;
};

// Leaked on purpose: an arena's thread may wait in it when the program ends.
inline CountingDriver& counting_driver() {
  static auto* const leaked = new CountingDriver;
  return *leaked;
}

inline const HostRegistration kCountingDriver{
    [](void* address, size_t nbytes) { return counting_driver().register_memory(address, nbytes); },
    [](void* address) { return counting_driver().unregister_memory(address); }};

}  // namespace torchoffload
