// GrowthPlan: how much memory a store takes from the system, for a request that found no room and ahead of need.
// Ownership:     numbers alone; the chunks are the store's.
// Thread safety: none; the store locks.
// Invariants:    a chunk ahead of need never lifts the capacity above the limit, and never above one chunk more than is
//                in use, except up to the reserved bytes.
// Not handled:   budgets (the engine's), how chunks are taken.
//
// Capacities are totals of the store. Three states, by the latest call:
//   grow_on_need   at first: nothing is taken ahead;
//   grow_ahead     the need is not known: as slots are acquired and room runs short, the next chunk is wanted, up to a
//                  limit;
//   reserve        the need is known: that much is wanted at once, and nothing beyond it.
#pragma once

#include <cstdint>
#include <optional>

#include "storage/chunk.h"

namespace torchoffload {

class GrowthPlan {
 public:
  // `page_bytes`: every chunk is a multiple of it.
  GrowthPlan(ChunkPolicy policy, uint64_t page_bytes) : policy_(policy), page_bytes_(page_bytes) {}

  void grow_on_need();
  void grow_ahead(uint64_t limit_bytes);
  void reserve(uint64_t capacity_bytes);

  // Events of the store.
  void saw_slot(uint64_t nbytes, uint64_t capacity_bytes, uint64_t largest_free_bytes);
  void saw_chunk(uint64_t nbytes);
  void saw_refusal(uint64_t nbytes);
  void saw_chunks_given_back();

  // The chunk for a request that found no room: by the policy, but not above the limit if the request itself is not. If
  // as much was refused, the least that will do: a refused size is not asked for again with every record.
  uint64_t bytes_on_need(uint64_t request_bytes, uint64_t capacity_bytes) const;
  uint64_t least_bytes(uint64_t request_bytes) const;
  // The same for memory that is not to be locked: refusals do not concern it.
  uint64_t bytes_unlocked(uint64_t request_bytes, uint64_t capacity_bytes) const;

  // The chunk to take ahead of need, now; 0 for none. None if as much was refused, until the system gave as much or was
  // given something back.
  uint64_t bytes_ahead(uint64_t capacity_bytes) const;

  // Is the capacity more than 5% above the need, and was the store not shrunk to that need already? Once is enough: a
  // step that does not fit into it then would not fit the next time either.
  bool should_shrink(uint64_t needed_bytes, uint64_t capacity_bytes) const;
  void saw_shrink(uint64_t needed_bytes, uint64_t capacity_bytes);

 private:
  uint64_t chunk_bytes(uint64_t capacity_bytes) const;
  uint64_t within_limit(uint64_t nbytes, uint64_t capacity_bytes) const;
  bool was_refused(uint64_t nbytes) const { return refused_bytes_ > 0 && nbytes >= refused_bytes_; }
  uint64_t most_bytes(uint64_t needed_bytes) const;

  const ChunkPolicy policy_;
  const uint64_t page_bytes_;

  std::optional<uint64_t> limit_bytes_;  // absent: nothing is taken ahead
  uint64_t wanted_bytes_ = 0;            // <= limit_bytes_
  uint64_t largest_slot_bytes_ = 0;      // of those that a chunk ahead is meant for
  uint64_t last_chunk_bytes_ = 0;
  uint64_t refused_bytes_ = 0;  // the least that was refused; 0: nothing was
  uint64_t shrunk_to_bytes_ = 0;
};

}  // namespace torchoffload
