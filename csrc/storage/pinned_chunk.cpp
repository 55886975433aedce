#include "storage/pinned_chunk.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "system/numa.h"
#include "system/process.h"

namespace torchoffload {
namespace {

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

// Anonymous memory that begins at a multiple of `page_bytes`.
std::byte* map_aligned(uint64_t nbytes, uint64_t page_bytes) {
  const uint64_t mapped_bytes = nbytes + page_bytes;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw StoreFull(mmap_refusal(nbytes, errno));
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = round_up(begin, page_bytes);
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

// Registering wants the pages present, and one thread fills them far below the memory's rate. `cpus`: those of the
// memory's intended node, if the CPU that touches a page first decides its node.
void touch_in_parallel(std::byte* address, uint64_t nbytes, const std::optional<cpu_set_t>& cpus) {
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
        threads.emplace_back([=, &cpus] {
          if (cpus) pthread_setaffinity_np(pthread_self(), sizeof(*cpus), &*cpus);  // refused: wherever it runs
          touch(address + offset, share_bytes);
        });
      }
    } catch (const std::system_error&) {
      // No thread to be had: the calling thread touches the rest.
    }
  }
  touch(address + offset, nbytes - offset);
  for (std::thread& thread : threads) thread.join();
}

// Has the chunk's pages come from the device's node. If the kernel does not let us say so, returns that node's CPUs.
std::optional<cpu_set_t> place(const PinnedChunk& chunk, const HostRegistration& registration) {
  const std::optional<int> node = registration.node != nullptr ? registration.node() : std::nullopt;
  if (!node || prefer_node(chunk.address, chunk.nbytes, *node)) return std::nullopt;
  return cpus_of_node(*node);
}

}  // namespace

PinnedChunk take_plain_chunk(uint64_t nbytes, uint64_t page_bytes, const HostRegistration& registration) {
  const PinnedChunk chunk{map_aligned(nbytes, page_bytes), nbytes};
  // Fewer pages to fault in and to register. A kernel without huge pages refuses, and small ones do as well.
  madvise(chunk.address, nbytes, MADV_HUGEPAGE);
  // A child that shared these pages copy-on-write would move them away under a copy in flight.
  madvise(chunk.address, nbytes, MADV_DONTFORK);
  touch_in_parallel(chunk.address, nbytes, place(chunk, registration));
  return chunk;
}

PinnedChunk take_pinned_chunk(uint64_t nbytes, uint64_t page_bytes, const HostRegistration& registration) {
  if (registration.allocate != nullptr) {
    std::string refusal;
    std::byte* const address = registration.allocate(nbytes, refusal);
    if (address == nullptr)
      throw LockRefused("the device's allocator of host memory refused " + std::to_string(nbytes) +
                        " bytes: " + refusal + limit_text(RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK"));
    return {address, nbytes, /*is_locked=*/true, /*is_allocated=*/true};
  }
  PinnedChunk chunk = take_plain_chunk(nbytes, page_bytes, registration);
  if (registration.register_memory == nullptr) return chunk;
  const std::string refusal = registration.register_memory(chunk.address, nbytes);
  chunk.is_locked = refusal.empty();
  if (chunk.is_locked) return chunk;
  munmap(chunk.address, nbytes);
  throw LockRefused("the driver refused to pin " + std::to_string(nbytes) + " bytes of host memory: " + refusal +
                    limit_text(RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK"));
}

bool free_chunk(const PinnedChunk& chunk, const HostRegistration& registration) {
  if (chunk.is_allocated) {
    registration.free(chunk.address);
    return true;
  }
  if (chunk.is_locked && !registration.unregister_memory(chunk.address).empty()) return false;
  munmap(chunk.address, chunk.nbytes);
  return true;
}

}  // namespace torchoffload
