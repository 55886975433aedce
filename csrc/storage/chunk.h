// chunk.h: how much a store takes from the system when it grows.
// Ownership:     values only.
// Thread safety: immutable values; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/types.h"
#include "storage/slot_store.h"

namespace torchoffload {

// No machine has room for more, and rounding it up could overflow.
inline constexpr uint64_t kMostBytes = uint64_t{1} << 62;

// A store grows by a quarter of its size, within these bounds, and by the request if that is more.
struct ChunkPolicy {
  uint64_t min_bytes = 64 * kMiB;
  uint64_t max_bytes = 256 * kMiB;

  uint64_t chunk_bytes(uint64_t request_bytes, uint64_t capacity_bytes, uint64_t multiple) const {
    const uint64_t growth_bytes = std::min(std::max(capacity_bytes / 4, min_bytes), std::max(min_bytes, max_bytes));
    return std::max(round_up(growth_bytes, multiple), round_up(std::max<uint64_t>(request_bytes, 1), multiple));
  }
};

inline void require_sane_request(uint64_t request_bytes, const char* tier) {
  if (request_bytes <= kMostBytes) return;
  throw StoreFull("a slot of " + std::to_string(request_bytes) + " bytes is more than any " + tier + " can hold");
}

}  // namespace torchoffload
