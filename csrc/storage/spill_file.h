// SpillFile: slots in an unlinked file of its own, for records that rest on a disk.
// Ownership:     hands out slots, which are values; the file ends with the process, however that ends, or with a trim()
//                that leaves nothing in it. The next grow() makes another.
// Thread safety: every method, any thread. grow() and trim() take turns, and hold up no other method while they ask the
//                system. Two transfers that touch one slot are ordered by the caller.
// Stream order:  a released range carries the points that guard its reuse; trim() alone waits for them, on the host.
// Shutdown:      leaked on purpose; see Note [No CUDA after main]. In a forked child it is full, and every transfer
//                fails: the file is the parent's; see Note [Forked children].
// Not handled:   encryption, compression, several disks.
//
// Spilled bytes must leave memory: I/O goes past the page cache (O_DIRECT, through aligned buffers of our own, since
// tensors are aligned to 64 bytes), and if that is refused, the pages are written back and dropped before a transfer
// counts as done. All offsets and slot sizes are multiples of 4096 bytes. Disk is reserved when the file grows, so a
// full disk shows there, as StoreFull, and not in a write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/range_allocator.h"
#include "storage/chunk.h"
#include "storage/slot_store.h"
#include "system/file_io.h"
#include "system/mutex.h"
#include "system/process.h"

namespace torchoffload {

inline constexpr uint64_t kDiskBlockBytes = 4096;

// Buffers that O_DIRECT accepts, as many as transfers ran at once. They are mapped, and their list has room from the
// start, so that an I/O thread never allocates: otherwise malloc would reserve an arena of 64 MiB of addresses for it.
class TransferBuffers {
 public:
  static constexpr uint64_t kBufferBytes = 4 * kMiB;

  TransferBuffers() { idle_.reserve(kUsualCount); }
  ~TransferBuffers();
  TransferBuffers(const TransferBuffers&) = delete;
  TransferBuffers& operator=(const TransferBuffers&) = delete;

  // Null when the system has no memory for one. Each is released.
  std::byte* try_acquire();
  void release(std::byte* buffer);

 private:
  static constexpr size_t kUsualCount = 16;

  Mutex mutex_;
  std::vector<std::byte*> idle_ GUARDED_BY(mutex_);
};

class SpillFile final : public SlotStore {
 public:
  // `synchronize` blocks the host until a point is reached. Throws OpenError if no file can be made, unless that may
  // pass: then, and if the directory has gone since, grow() throws StoreFull with the same text.
  SpillFile(std::string directory, std::function<void(Point)> synchronize, ChunkPolicy policy = {});

  uint64_t slot_bytes(uint64_t nbytes) const override { return round_up(nbytes, kDiskBlockBytes); }
  std::optional<Slot> try_acquire(uint64_t nbytes, std::vector<Point>& guards) override;
  void grow(uint64_t nbytes) override;
  void release(const Slot& slot, const std::vector<Point>& guards) override;
  uint64_t trim() override;
  uint64_t capacity_bytes() const override;
  uint64_t used_bytes() const override;
  uint64_t grow_count() const override { return grow_count_.load(std::memory_order_relaxed); }

  // The kind of memory that a transfer copies. Any: it goes past the page cache by way of a buffer. Blocks: it begins
  // at a multiple of 4096 bytes, as many as a multiple of that are moved, and nobody unmaps it meanwhile: it needs no
  // buffer.
  enum class Memory : uint8_t { Any, Blocks };

  // Move the first `nbytes` of a slot. Block. Return the reason of a failure, with file offset, byte counts and errno's
  // text, or empty: then all bytes are there.
  std::string write(const Slot& slot, const void* source, uint64_t nbytes, Memory memory = Memory::Any);
  std::string read(void* target, const Slot& slot, uint64_t nbytes, Memory memory = Memory::Any);

  const std::string& directory() const { return directory_; }
  std::string name() const { return "the spill file in " + quoted(directory_); }
  bool is_open() const;
  bool uses_direct_io() const;  // false if no file is open

  // As RangeAllocator's, and that no two chunks overlap in the file; for tests.
  void check_invariants() const;

 private:
  // The state of one file. A transfer holds it, so that its descriptors are never another file's.
  struct File {
    explicit File(const std::string& directory);

    const FileDescriptor cached;  // through the page cache
    const FileDescriptor direct;  // past it; may be closed
    std::atomic<bool> uses_direct_io;
    TransferBuffers buffers;
  };
  struct Idle {
    std::vector<Span> chunks;  // places in the file
    uint64_t end_of_others = 0;
  };
  struct FileSpan {
    std::shared_ptr<File> file;
    Span span;
  };

  std::string move(IoDirection direction, const Slot& slot, std::byte* bytes, uint64_t nbytes, Memory memory);
  // Past the page cache. False if that is refused here: then the caller goes through the page cache.
  static bool try_move_direct(File& file, IoDirection direction, std::byte* bytes, Span span, Memory memory,
                              IoResult& result);
  static IoResult move_through_buffer(const File& file, IoDirection direction, std::byte* bytes, Span span,
                                      std::byte* buffer);
  static IoResult move_cached(const File& file, IoDirection direction, std::byte* bytes, Span span);

  static std::shared_ptr<File> try_open(const std::string& directory);  // null if the refusal may pass
  bool can_acquire(uint64_t nbytes) const;
  // The lowest file offset with room for a chunk.
  uint64_t first_gap(uint64_t nbytes) const REQUIRES(grow_mutex_);
  void open_again() REQUIRES(grow_mutex_);  // throws StoreFull
  void close_if_empty() REQUIRES(grow_mutex_);
  // The file is changed under both locks, so that either is enough to read which one it is.
  File* file_in_turn() const REQUIRES(grow_mutex_) NO_THREAD_SAFETY_ANALYSIS { return file_.get(); }
  // Takes the chunks without a slot in use out of the allocator, once the host has waited for their guards. Blocks.
  Idle take_idle_chunks() REQUIRES(grow_mutex_);
  // The same if all guards were `reached`, which has the latest serial of each stream; else returns the others.
  std::optional<Idle> try_take_idle_chunks(const std::map<StreamId, uint64_t>& reached, std::vector<Point>& busy);
  void reserve_disk(Span span) const REQUIRES(grow_mutex_);  // throws StoreFull
  FileSpan locate(const Slot& slot, uint64_t nbytes) const;
  std::string describe(const char* what, Span span, const IoResult& result) const;

  const std::string directory_;
  const std::function<void(Point)> synchronize_;
  const ChunkPolicy policy_;
  const ForkGuard fork_guard_;

  Mutex grow_mutex_;  // held by grow() and trim() from end to end; taken before mutex_

  mutable Mutex mutex_;
  std::shared_ptr<File> file_ GUARDED_BY(mutex_);  // null only while there is no chunk; see file_in_turn()
  RangeAllocator ranges_ GUARDED_BY(mutex_){kDiskBlockBytes};
  // Places in the file. The keys are ranges_' blocks, and no two overlap.
  std::map<BlockId, Span> chunks_ GUARDED_BY(mutex_);

  std::atomic<uint64_t> grow_count_{0};
};

}  // namespace torchoffload
