// storage_faults.h: a system that fails now and then, from any thread, in an order that follows a seed; a driver that
// does is in growth_model.h.
// The stores are compiled with TORCHOFFLOAD_TESTING, so that their system calls can be replaced.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <string_view>

#include "driver.h"
#include "system/file_io.h"

namespace torchoffload::fuzz {

class Faults {
 public:
  enum FaultKind : uint8_t { Failed, Short, Interrupted, Reserve, Punch, Register, Unregister, kCount };

  // The calls of the stores go through here from now on.
  void begin(uint64_t seed);
  // Nothing fails any more.
  void stop() { is_on_ = false; }

  // True once in `times`, on average.
  bool happens(unsigned times) {
    uint64_t drawn = next_.fetch_add(0x9E3779B97F4A7C15U, std::memory_order_relaxed);  // splitmix64
    drawn = (drawn ^ (drawn >> 30)) * 0xBF58476D1CE4E5B9U;
    drawn = (drawn ^ (drawn >> 27)) * 0x94D049BB133111EBU;
    return is_on_.load(std::memory_order_relaxed) && (drawn ^ (drawn >> 31)) % times == 0;
  }
  bool happens(FaultKind kind, unsigned times) {
    if (!happens(times)) return false;
    counts_[kind].fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  void report(Coverage& coverage) {
    constexpr std::array<std::string_view, kCount> kNames = {
        "failed call", "short transfer", "interrupted", "disk full", "punch failed", "driver refused", "driver kept"};
    for (size_t kind = 0; kind < kCount; ++kind) {
      const uint64_t count = counts_[kind].exchange(0);
      if (count > 0) coverage.saw(kNames[kind], count);
    }
  }

 private:
  std::atomic<bool> is_on_{false};
  std::atomic<uint64_t> next_{0};
  std::array<std::atomic<uint64_t>, kCount> counts_{};
};

inline Faults& faults() {
  static auto* const leaked = new Faults;
  return *leaked;
}

inline constexpr off_t kMostFileBytes = off_t{1} << 20;

// Fails, or falls short: mostly by whole blocks, so that I/O past the page cache goes on.
inline bool is_faulty_transfer(size_t& nbytes) {
  if (faults().happens(Faults::Interrupted, 32)) {
    errno = EINTR;
    return true;
  }
  if (faults().happens(Faults::Failed, 64)) {
    errno = faults().happens(2) ? EIO : ENOSPC;
    return true;
  }
  if (nbytes > 512 && faults().happens(Faults::Short, 8)) {
    const size_t unit = faults().happens(64) ? 100 : 4096;
    nbytes = std::min(nbytes, std::max(unit, nbytes / 2 / unit * unit));
  }
  return false;
}

inline void Faults::begin(uint64_t seed) {
  next_ = seed * 0x2545F4914F6CDD1DU;
  is_on_ = true;
  io_calls = {[](int fd, void* buffer, size_t nbytes, off_t offset) {
                return is_faulty_transfer(nbytes) ? -1 : ::pread(fd, buffer, nbytes, offset);
              },
              [](int fd, const void* buffer, size_t nbytes, off_t offset) {
                return is_faulty_transfer(nbytes) ? -1 : ::pwrite(fd, buffer, nbytes, offset);
              },
              [](int fd, off_t offset, off_t nbytes) {
                const bool is_full = offset + nbytes > kMostFileBytes || faults().happens(Reserve, 16);
                return is_full ? ENOSPC : kSystemCalls.reserve(fd, offset, nbytes);
              },
              [](int fd, off_t offset, off_t nbytes) {
                if (!faults().happens(Punch, 8)) return kSystemCalls.punch_hole(fd, offset, nbytes);
                errno = EOPNOTSUPP;
                return -1;
              },
              [](int fd, off_t offset, off_t nbytes, int flags) {
                if (!faults().happens(Failed, 64)) return kSystemCalls.write_back(fd, offset, nbytes, flags);
                errno = EIO;
                return -1;
              }};
}

}  // namespace torchoffload::fuzz
