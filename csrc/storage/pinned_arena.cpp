#include "storage/pinned_arena.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "core/mutant.h"

namespace torchoffload {
namespace {

constexpr uint64_t kHugePageBytes = 2 * kMiB;
constexpr uint64_t kParallelTouchBytes = 64 * kMiB;  // below it, starting threads costs more than it saves
constexpr unsigned kMaxTouchThreads = 16;

std::string limit_text(int resource, const char* name) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return std::string("; ") + name + " is " + std::to_string(limit.rlim_cur) + " bytes";
}

std::string mmap_refusal(uint64_t nbytes, int error) {
  return "the system refused " + std::to_string(nbytes) + " bytes of host memory: " + std::strerror(error) +
         limit_text(RLIMIT_AS, "RLIMIT_AS") + limit_text(RLIMIT_DATA, "RLIMIT_DATA");
}

// Anonymous memory that begins at a multiple of a huge page; `nbytes` is a multiple of it too.
std::byte* map_aligned(uint64_t nbytes) {
  const uint64_t mapped_bytes = nbytes + kHugePageBytes;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw StoreFull(mmap_refusal(nbytes, errno));
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = round_up(begin, kHugePageBytes);
  const uintptr_t end = aligned + nbytes;
  if (aligned > begin) munmap(mapped, aligned - begin);
  if (begin + mapped_bytes > end) munmap(reinterpret_cast<void*>(end), begin + mapped_bytes - end);
  return reinterpret_cast<std::byte*>(aligned);
}

void touch(std::byte* address, uint64_t nbytes) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t offset = 0; offset < nbytes; offset += page_bytes) {
    *const_cast<volatile std::byte*>(address + offset) = std::byte{0};
  }
}

// Registering wants the pages present, and one thread fills them far below the memory's rate.
void touch_in_parallel(std::byte* address, uint64_t nbytes) {
  unsigned thread_count = std::clamp(std::thread::hardware_concurrency(), 1U, kMaxTouchThreads);
  if (nbytes < kParallelTouchBytes) thread_count = 1;
  const uint64_t share_bytes = round_up((nbytes + thread_count - 1) / thread_count, kHugePageBytes);

  std::vector<std::thread> threads;
  threads.reserve(thread_count);
  uint64_t offset = 0;
  {
    SignalBlock no_signals;
    try {
      for (; offset + share_bytes < nbytes; offset += share_bytes) {
        threads.emplace_back(touch, address + offset, share_bytes);
      }
    } catch (const std::system_error&) {
      // No thread to be had: the calling thread touches what is left.
    }
  }
  touch(address + offset, nbytes - offset);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

PinnedArena::PinnedArena(HostRegistration registration, std::function<void(Point)> synchronize, ChunkPolicy policy)
    : registration_(registration), synchronize_(std::move(synchronize)), policy_(policy) {}

PinnedArena::~PinnedArena() {
  if (registration_.register_memory != nullptr || fork_guard_.inherited()) return;
  for (const auto& [id, chunk] : chunks_) munmap(chunk.address, chunk.nbytes);
}

std::optional<Slot> PinnedArena::try_acquire(uint64_t nbytes, std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return std::nullopt;
  std::lock_guard lock(mutex_);
  const std::optional<Range> range = ranges_.try_acquire(nbytes, guards);
  if (!range) return std::nullopt;
  return Slot{*range, chunks_.at(range->block).address + range->offset};
}

void PinnedArena::grow(uint64_t nbytes) {
  if (fork_guard_.inherited()) throw StoreFull("pinned memory was inherited by a forked process, which cannot use it");
  require_sane_request(nbytes, "host memory");
  std::lock_guard growing(grow_mutex_);
  if (fits(nbytes)) return;  // another thread grew it, or released a slot, meanwhile
  const uint64_t request_bytes = policy_.chunk_bytes(nbytes, capacity_bytes(), kHugePageBytes);
  const uint64_t least_bytes = round_up(std::max<uint64_t>(nbytes, 1), kHugePageBytes);
  Chunk chunk;
  try {
    chunk = take_from_system(request_bytes);
  } catch (const StoreFull&) {
    if (least_bytes == request_bytes) throw;
    chunk = take_from_system(least_bytes);
  }
  grow_count_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  chunks_.emplace(ranges_.add_block(chunk.nbytes), chunk);
}

void PinnedArena::release(const Slot& slot, const std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return;
  std::lock_guard lock(mutex_);
  ranges_.release(slot.range, guards);
}

uint64_t PinnedArena::trim() {
  if (fork_guard_.inherited()) return 0;
  std::lock_guard growing(grow_mutex_);
  std::vector<std::pair<Chunk, std::vector<Point>>> idle;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, guards] : ranges_.idle_blocks()) {
      idle.emplace_back(chunks_.at(id), std::move(guards));
      ranges_.remove_block(id);
      chunks_.erase(id);
    }
  }
  // Out of the allocator's sight now, so nothing new can touch it; the waits hold up nobody.
  uint64_t given_back_bytes = 0;
  for (const auto& [chunk, guards] : idle) {
    // The host waits for every guard: a copy in flight must not lose its pages.
    for (const Point& guard : guards) {
      if (!mutated(Mutant::TrimWaitsForGuards)) synchronize_(guard);
    }
    if (give_to_system(chunk)) given_back_bytes += chunk.nbytes;
  }
  return given_back_bytes;
}

uint64_t PinnedArena::capacity_bytes() const {
  if (fork_guard_.inherited()) return 0;
  std::lock_guard lock(mutex_);
  return ranges_.capacity_bytes();
}

uint64_t PinnedArena::used_bytes() const {
  if (fork_guard_.inherited()) return 0;
  std::lock_guard lock(mutex_);
  return ranges_.used_bytes();
}

void PinnedArena::check_invariants() const {
  std::lock_guard lock(mutex_);
  ranges_.check_invariants();
}

bool PinnedArena::fits(uint64_t nbytes) const {
  std::lock_guard lock(mutex_);
  return ranges_.capacity_bytes() > 0 && ranges_.largest_free_bytes() >= std::max<uint64_t>(nbytes, 1);
}

PinnedArena::Chunk PinnedArena::take_from_system(uint64_t nbytes) const {
  const Chunk chunk{map_aligned(nbytes), nbytes};
  madvise(chunk.address, nbytes, MADV_HUGEPAGE);  // best effort: fewer pages to fault in and to register
  // A child that shared these pages copy-on-write would move them away under a copy in flight.
  madvise(chunk.address, nbytes, MADV_DONTFORK);
  touch_in_parallel(chunk.address, nbytes);
  if (registration_.register_memory == nullptr) return chunk;
  const std::string refusal = registration_.register_memory(chunk.address, nbytes);
  if (refusal.empty()) return chunk;
  munmap(chunk.address, nbytes);
  throw StoreFull("the driver refused to pin " + std::to_string(nbytes) + " bytes of host memory: " + refusal +
                  limit_text(RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK"));
}

bool PinnedArena::give_to_system(const Chunk& chunk) const {
  if (registration_.unregister_memory != nullptr && !registration_.unregister_memory(chunk.address).empty())
    return false;
  munmap(chunk.address, chunk.nbytes);
  return true;
}

}  // namespace torchoffload
