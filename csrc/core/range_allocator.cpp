#include "core/range_allocator.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace torchoffload {
namespace {

void require(bool holds, const char* what, BlockId block) {
  if (!holds) throw std::logic_error("RangeAllocator, block " + std::to_string(block) + ": " + what);
}

}  // namespace

void RangeAllocator::merge_guard(Guards& into, const Point& guard) {
  if (guard.is_beginning()) return;
  const auto same_stream = [&](const Point& point) { return point.stream == guard.stream; };
  const auto known = std::find_if(into.begin(), into.end(), same_stream);
  if (known == into.end()) {
    into.push_back(guard);
  } else {
    known->serial = std::max(known->serial, guard.serial);
  }
}

RangeAllocator::RangeAllocator(uint64_t granularity_bytes) : granularity_bytes_(granularity_bytes) {
  if (granularity_bytes == 0) throw std::logic_error("RangeAllocator: a granularity of 0 bytes");
}

BlockId RangeAllocator::add_block(uint64_t nbytes) {
  require(nbytes > 0 && nbytes % granularity_bytes_ == 0, "its size is not a multiple of the granularity", next_block_);
  const BlockId id = next_block_++;
  Block& block = blocks_.try_emplace(id, &pool_).first->second;
  block.nbytes = nbytes;
  capacity_bytes_ += nbytes;
  insert_free(id, block, 0, FreeRange{nbytes, Guards(&pool_)});
  return id;
}

std::optional<Range> RangeAllocator::try_acquire(uint64_t nbytes, std::vector<Point>& guards) {
  if (nbytes > capacity_bytes_) return std::nullopt;  // before rounding up, which may overflow
  const uint64_t wanted = round_up(std::max<uint64_t>(nbytes, 1), granularity_bytes_);
  auto best = by_size_.lower_bound(SizeKey{wanted, {0, 0}});
  if (best == by_size_.end()) return std::nullopt;
  const auto [id, offset] = best->second;

  Block& block = blocks_.at(id);
  const auto range = block.free_ranges.find(offset);
  guards.insert(guards.end(), range->second.guards.begin(), range->second.guards.end());
  block.used_ranges.emplace(offset, wanted);
  used_bytes_ += wanted;
  if (range->second.nbytes > wanted) {
    cut_front(id, block, range, wanted);
  } else {
    by_size_.erase(best);
    block.free_ranges.erase(range);
  }
  return Range{id, offset, wanted};
}

// The free range's end stays free. It has the same neighbours, so both nodes are used again.
void RangeAllocator::cut_front(BlockId id, Block& block, FreeRanges::iterator range, uint64_t nbytes) {
  auto by_size = by_size_.extract(size_key(id, *range));
  const auto next = std::next(range);
  auto by_offset = block.free_ranges.extract(range);
  by_offset.key() += nbytes;
  by_offset.mapped().nbytes -= nbytes;
  by_size.value() = SizeKey{by_offset.mapped().nbytes, {id, by_offset.key()}};
  by_size_.insert(std::move(by_size));
  block.free_ranges.insert(next, std::move(by_offset));
}

void RangeAllocator::release(const Range& range, const std::vector<Point>& guards) {
  auto block = blocks_.find(range.block);
  require(block != blocks_.end(), "a range of an unknown block was released", range.block);
  auto used = block->second.used_ranges.find(range.offset);
  require(used != block->second.used_ranges.end() && used->second == range.nbytes,
          "a range that is not in use was released", range.block);
  FreeRange freed{range.nbytes, Guards(&pool_)};
  freed.guards.reserve(guards.size());
  for (const Point& guard : guards) merge_guard(freed.guards, guard);
  block->second.used_ranges.erase(used);
  used_bytes_ -= range.nbytes;
  insert_free(range.block, block->second, range.offset, std::move(freed));
}

std::vector<std::pair<BlockId, std::vector<Point>>> RangeAllocator::idle_blocks() const {
  std::vector<std::pair<BlockId, std::vector<Point>>> idle;
  for (const auto& [id, block] : blocks_) {
    // Free neighbours are always merged, so a block that is not in use is one free range.
    if (!block.used_ranges.empty() || block.free_ranges.empty()) continue;
    const Guards& guards = block.free_ranges.begin()->second.guards;
    idle.emplace_back(id, std::vector<Point>(guards.begin(), guards.end()));
  }
  return idle;
}

void RangeAllocator::remove_block(BlockId id) {
  auto block = blocks_.find(id);
  require(block != blocks_.end(), "an unknown block was removed", id);
  require(block->second.used_ranges.empty(), "a block in use was removed", id);
  by_size_.erase(size_key(id, *block->second.free_ranges.begin()));
  capacity_bytes_ -= block->second.nbytes;
  blocks_.erase(block);
}

uint64_t RangeAllocator::largest_free_bytes() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

void RangeAllocator::insert_free(BlockId id, Block& block, uint64_t offset, FreeRange range) {
  auto next = block.free_ranges.lower_bound(offset);
  if (next != block.free_ranges.end() && next->first == offset + range.nbytes) {
    range.nbytes += next->second.nbytes;
    for (const Point& guard : next->second.guards) merge_guard(range.guards, guard);
    by_size_.erase(size_key(id, *next));
    next = block.free_ranges.erase(next);
  }
  if (next != block.free_ranges.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second.nbytes == offset) {
      range.nbytes += previous->second.nbytes;
      for (const Point& guard : previous->second.guards) merge_guard(range.guards, guard);
      by_size_.erase(size_key(id, *previous));
      previous->second = std::move(range);
      by_size_.insert(size_key(id, *previous));
      return;
    }
  }
  next = block.free_ranges.emplace_hint(next, offset, std::move(range));
  by_size_.insert(size_key(id, *next));
}

void RangeAllocator::check_invariants() const {
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;
  size_t free_count = 0;
  for (const auto& [id, block] : blocks_) {
    check_block(id, block);
    capacity_bytes += block.nbytes;
    for (const auto& [offset, nbytes] : block.used_ranges) used_bytes += nbytes;
    free_count += block.free_ranges.size();
  }
  require(capacity_bytes == capacity_bytes_, "capacity_bytes is not the sum of the blocks", next_block_);
  require(used_bytes == used_bytes_, "used_bytes is not the sum of the used ranges", next_block_);
  require(free_count == by_size_.size(), "by_size holds a range that is not free", next_block_);
}

void RangeAllocator::check_block(BlockId id, const Block& block) const {
  auto free = block.free_ranges.begin();
  auto used = block.used_ranges.begin();
  uint64_t position = 0;
  bool previous_is_free = false;
  while (position < block.nbytes) {
    uint64_t nbytes = 0;
    if (free != block.free_ranges.end() && free->first == position) {
      require(!previous_is_free, "two free neighbours are not merged", id);
      nbytes = free->second.nbytes;
      require(by_size_.count(SizeKey{nbytes, {id, position}}) == 1, "a free range is missing from by_size", id);
      std::set<StreamId> streams;
      for (const Point& guard : free->second.guards) {
        require(!guard.is_beginning(), "a guard is always reached", id);
        require(streams.insert(guard.stream).second, "two guards of one stream are not merged", id);
      }
      previous_is_free = true;
      ++free;
    } else {
      require(used != block.used_ranges.end() && used->first == position, "the ranges do not tile the block", id);
      nbytes = used->second;
      previous_is_free = false;
      ++used;
    }
    require(nbytes > 0 && nbytes % granularity_bytes_ == 0, "a range is not a multiple of the granularity", id);
    position += nbytes;
  }
  require(position == block.nbytes && free == block.free_ranges.end() && used == block.used_ranges.end(),
          "the ranges do not tile the block", id);
}

}  // namespace torchoffload
