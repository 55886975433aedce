#include "testing/sim_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace torchoffload {

namespace {

// Not a number in every floating-point type, and -1 in integers: it survives arithmetic, and equals nothing.
constexpr int kPoison = 0xFF;

}  // namespace

SimBlock& SimHeap::allocate(uint64_t nbytes, int device, StreamId stream, MemoryOwner owner, uint64_t simulation) {
  const uint64_t rounded = round_up(std::max<uint64_t>(nbytes, 1), kAlignmentBytes);
  std::byte* address = nullptr;
  if (const auto pool = pools_.find({stream, rounded}); pool != pools_.end() && !pool->second.empty()) {
    address = pool->second.back();
    pool->second.pop_back();
  } else {
    address = static_cast<std::byte*>(std::aligned_alloc(kAlignmentBytes, rounded));
    if (address == nullptr) throw std::bad_alloc();
    std::memset(address, kPoison, rounded);
  }
  Usage& usage = usage_[device];
  usage.allocated_bytes += rounded;
  usage.peak_bytes = std::max(usage.peak_bytes, usage.allocated_bytes);
  return blocks_
      .insert_or_assign(address, SimBlock{address, rounded, simulation, ++allocation_count_, device, stream, owner, {}})
      .first->second;
}

SimBlock* SimHeap::find(const void* address) {
  const auto* wanted = static_cast<const std::byte*>(address);
  auto after = blocks_.upper_bound(wanted);
  if (after == blocks_.begin()) return nullptr;
  SimBlock& block = std::prev(after)->second;
  return wanted < block.address + block.nbytes ? &block : nullptr;
}

void SimHeap::free(const SimBlock& block, Reuse reuse) {
  std::byte* const address = block.address;
  usage_[block.device].allocated_bytes -= block.nbytes;
  if (reuse == Reuse::AtOnce) {
    std::memset(address, kPoison, block.nbytes);
    pools_[{block.stream, block.nbytes}].push_back(address);
  } else {
    withheld_.push_back(address);
  }
  blocks_.erase(address);
}

void SimHeap::free_to_system(const SimBlock& block) {
  std::byte* const address = block.address;
  blocks_.erase(address);
  std::free(address);
}

void SimHeap::release_pools() {
  for (auto& [bin, pool] : pools_) withheld_.insert(withheld_.end(), pool.begin(), pool.end());
  for (std::byte* address : withheld_) std::free(address);
  pools_.clear();
  withheld_.clear();
}

void SimHeap::reset_statistics() { usage_.clear(); }

uint64_t SimHeap::allocated_bytes(int device) const {
  const auto usage = usage_.find(device);
  return usage == usage_.end() ? 0 : usage->second.allocated_bytes;
}

uint64_t SimHeap::peak_bytes(int device) const {
  const auto usage = usage_.find(device);
  return usage == usage_.end() ? 0 : usage->second.peak_bytes;
}

uint64_t SimHeap::take_peak_bytes(int device) {
  Usage& usage = usage_[device];
  return std::exchange(usage.peak_bytes, usage.allocated_bytes);
}

}  // namespace torchoffload
