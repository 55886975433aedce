// RangeAllocator: cuts big blocks into exact ranges; a freed range carries the points that guard its reuse.
// Ownership:     hands out values; the blocks' memory belongs to the caller.
// Thread safety: none; the caller locks.
// Stream order:  release() takes the points after which a range may be written again, and try_acquire() returns those
//                that guard the range it returns. Of several points of one stream the latest is kept (see Point).
// Invariants:    free and used ranges tile each block exactly, two free neighbours are always merged, and
//                used_bytes() + free_bytes() == capacity_bytes().
// Not handled:   moving a range that is in use; growing (add_block is the caller's decision).
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/node_pool.h"
#include "core/types.h"

namespace torchoffload {

using BlockId = uint32_t;

struct Range {
  BlockId block = 0;
  uint64_t offset = 0;
  uint64_t nbytes = 0;

  friend bool operator==(const Range&, const Range&) = default;
};

class RangeAllocator {
 public:
  // `granularity_bytes`: every range is a multiple of it and begins at a multiple of it.
  explicit RangeAllocator(uint64_t granularity_bytes = kAlignmentBytes);

  // Adds a wholly free block of `nbytes` (a multiple of the granularity) and returns its id. Ids are not reused.
  BlockId add_block(uint64_t nbytes);

  // Best fit: takes the smallest free range that holds `nbytes`, rounded up to the granularity and at least one
  // granule; of equal ones the one with the lowest block and offset. Appends to `guards` the points to wait for before
  // the range is written. Never grows; nullopt when nothing fits.
  std::optional<Range> try_acquire(uint64_t nbytes, std::vector<Point>& guards);

  // Gives a range back. It may be acquired again at once; `guards` are the points after which it may be written again.
  // Throws std::logic_error, and changes nothing, if no range in use is exactly `range`.
  void release(const Range& range, const std::vector<Point>& guards);

  // The blocks of which no range is in use, lowest id first, with the guards of all their free ranges.
  std::vector<std::pair<BlockId, std::vector<Point>>> idle_blocks() const;

  // Forgets an idle block. The caller waits for its guards before its memory goes elsewhere. Throws std::logic_error if
  // the block is unknown or in use.
  void remove_block(BlockId block);

  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t free_bytes() const { return capacity_bytes_ - used_bytes_; }
  uint64_t largest_free_bytes() const;

  // Throws std::logic_error naming the broken invariant; for tests and debug builds.
  void check_invariants() const;

 private:
  using Guards = std::pmr::vector<Point>;
  struct FreeRange {
    uint64_t nbytes;
    Guards guards;
  };
  using FreeRanges = std::pmr::map<uint64_t, FreeRange>;  // by offset
  struct Block {
    explicit Block(NodePool* pool) : free_ranges(pool), used_ranges(pool) {}

    uint64_t nbytes = 0;
    FreeRanges free_ranges;
    std::pmr::map<uint64_t, uint64_t> used_ranges;  // offset -> nbytes
  };
  using SizeKey = std::pair<uint64_t, std::pair<BlockId, uint64_t>>;

  // Inserts a free range, and merges it with its free neighbours.
  void insert_free(BlockId id, Block& block, uint64_t offset, FreeRange range);
  // Keeps one point for each stream, the latest: once it is reached, the earlier ones are reached too.
  static void merge_guard(Guards& into, const Point& guard);
  // Takes the first `nbytes` of a larger free range out of both indices.
  void cut_front(BlockId id, Block& block, FreeRanges::iterator range, uint64_t nbytes);
  // Of a free range of the block.
  static SizeKey size_key(BlockId id, const FreeRanges::value_type& range) {
    return {range.second.nbytes, {id, range.first}};
  }
  void check_block(BlockId id, const Block& block) const;

  uint64_t granularity_bytes_;
  uint64_t capacity_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  BlockId next_block_ = 0;
  NodePool pool_;  // of the two maps below, and destroyed after them
  std::map<BlockId, Block> blocks_;
  std::pmr::set<SizeKey> by_size_{&pool_};  // every free range once
};

}  // namespace torchoffload
