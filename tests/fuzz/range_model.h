// RangeModel: what a RangeAllocator should say, from one entry for each granule of each block. Slow, and too simple to
// be wrong: no ranges, no merging, no index by size. CheckedRanges: the two side by side.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/range_allocator.h"
#include "driver.h"

namespace torchoffload::fuzz {

class RangeModel {
 public:
  static constexpr size_t kStreamCount = 3;
  // Of each stream the latest point that guards a granule; 0 is none.
  using Latest = std::array<uint64_t, kStreamCount>;

  void add_block(BlockId id, uint64_t nbytes) {
    expect(!blocks_.contains(id), "a block's id was given twice");
    blocks_[id].resize(nbytes / kAlignmentBytes);
  }

  void remove_block(BlockId id) { blocks_.erase(id); }

  // The allocator answered a request for `nbytes`; `guards` is what it gave along.
  void acquired(uint64_t nbytes, const std::optional<Range>& range, const std::vector<Point>& guards) {
    const uint64_t wanted = std::max<uint64_t>((nbytes + kAlignmentBytes - 1) / kAlignmentBytes, 1);
    const std::optional<Run> best = best_fit(wanted);
    expect(range.has_value() == best.has_value(), "something fits and was not given, or the reverse");
    if (!range) return;
    expect(*range == Range{best->block, best->first * kAlignmentBytes, wanted * kAlignmentBytes},
           "what was given is not the best fit");
    Latest given{};
    for (const Point& guard : guards) {
      expect(guard.serial > 0 && given.at(guard.stream) == 0, "a guard of nothing, or two of one stream");
      given.at(guard.stream) = guard.serial;
    }
    expect(covers(given, *range), "a range was handed out without a point that guards it");
    for_each(*range, [](Granule& granule) { granule.is_used = true; });
  }

  void released(const Range& range, const std::vector<Point>& guards) {
    for_each(range, [&](Granule& granule) {
      granule = {};
      for (const Point& guard : guards)
        granule.latest.at(guard.stream) = std::max(granule.latest.at(guard.stream), guard.serial);
    });
  }

  bool is_in_use(const Range& range) const {
    const auto block = blocks_.find(range.block);
    if (block == blocks_.end()) return false;
    const uint64_t first = range.offset / kAlignmentBytes;
    return first < block->second.size() && block->second[first].is_used;
  }

  void check(const RangeAllocator& ranges) {
    ranges.check_invariants();
    uint64_t used = 0;
    uint64_t all = 0;
    std::vector<BlockId> idle;
    for (const auto& [id, granules] : blocks_) {
      const auto here = std::count_if(granules.begin(), granules.end(), [](const Granule& g) { return g.is_used; });
      if (here == 0) idle.push_back(id);
      used += static_cast<uint64_t>(here);
      all += granules.size();
    }
    expect(ranges.used_bytes() == used * kAlignmentBytes, "ranges were lost or made up");
    expect(ranges.capacity_bytes() == all * kAlignmentBytes, "blocks were lost or made up");
    uint64_t largest = 0;
    for (const Run& run : free_runs()) largest = std::max(largest, run.count);
    expect(ranges.largest_free_bytes() == largest * kAlignmentBytes, "the largest free range is another");
    check_idle(ranges, idle);
  }

 private:
  struct Granule {
    bool is_used = false;
    Latest latest{};
  };
  struct Run {
    BlockId block = 0;
    uint64_t first = 0;  // granule
    uint64_t count = 0;
  };

  template <typename Visit>
  void for_each(const Range& range, Visit visit) {
    std::vector<Granule>& granules = blocks_.at(range.block);
    for (uint64_t offset = range.offset; offset < range.offset + range.nbytes; offset += kAlignmentBytes)
      visit(granules.at(offset / kAlignmentBytes));
  }

  bool covers(const Latest& given, const Range& range) {
    bool all = true;
    for_each(range, [&](const Granule& granule) {
      for (size_t stream = 0; stream < kStreamCount; ++stream) all &= given[stream] >= granule.latest[stream];
    });
    return all;
  }

  // Lowest block and offset first.
  std::vector<Run> free_runs() const {
    std::vector<Run> runs;
    for (const auto& [id, granules] : blocks_) {
      for (uint64_t next = 0; next < granules.size(); ++next) {
        if (granules[next].is_used) continue;
        if (next == 0 || granules[next - 1].is_used) runs.push_back({id, next, 0});
        ++runs.back().count;
      }
    }
    return runs;
  }

  std::optional<Run> best_fit(uint64_t wanted) const {
    std::optional<Run> best;
    for (const Run& run : free_runs()) {
      if (run.count >= wanted && (!best || run.count < best->count)) best = run;
    }
    return best;
  }

  void check_idle(const RangeAllocator& ranges, const std::vector<BlockId>& idle) {
    const auto told = ranges.idle_blocks();
    expect(told.size() == idle.size(), "an idle block is not told of, or one in use is");
    for (size_t next = 0; next < told.size(); ++next) {
      const auto& [id, guards] = told[next];
      Latest given{};
      for (const Point& guard : guards) given.at(guard.stream) = guard.serial;
      expect(id == idle[next] && covers(given, {id, 0, blocks_.at(id).size() * kAlignmentBytes}),
             "an idle block without a point that guards it");
    }
  }

  std::map<BlockId, std::vector<Granule>> blocks_;
};

class CheckedRanges {
 public:
  // `latest_serial`: no guard is later. Tells whether the range was another's before.
  std::optional<Range> acquire(uint64_t nbytes, uint64_t latest_serial, bool& is_reused) {
    std::vector<Point> guards;
    const std::optional<Range> range = ranges_.try_acquire(nbytes, guards);
    model_.acquired(nbytes, range, guards);
    for (const Point& guard : guards) expect(guard.serial <= latest_serial, "a guard that was never given");
    is_reused = !guards.empty();
    return range;
  }

  void release(const Range& range, const std::vector<Point>& guards) {
    ranges_.release(range, guards);
    model_.released(range, guards);
  }

  // Releases what is not in use, which must throw; check() sees that nothing changed. False: it is in use.
  bool refuses(const Range& range) {
    if (model_.is_in_use(range)) return false;
    try {
      ranges_.release(range, {{0, 1}});
    } catch (const std::logic_error&) {
      return true;
    }
    throw std::runtime_error("a range that is not in use was taken back");
  }

  void grow(uint64_t nbytes) { model_.add_block(ranges_.add_block(nbytes), nbytes); }

  // Takes an idle block away, if there is more than one.
  bool shrink() {
    const auto idle = ranges_.idle_blocks();
    if (idle.size() <= 1) return false;
    ranges_.remove_block(idle.front().first);
    model_.remove_block(idle.front().first);
    return true;
  }

  uint64_t largest_free_bytes() const { return ranges_.largest_free_bytes(); }
  uint64_t used_bytes() const { return ranges_.used_bytes(); }
  void check() { model_.check(ranges_); }

 private:
  RangeAllocator ranges_;
  RangeModel model_;
};

}  // namespace torchoffload::fuzz
