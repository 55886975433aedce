#include "storage/spill_file.h"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "system/mutex.h"

namespace torchoffload {
namespace {

constexpr char kSpillFileInherited[] = "the spill file was inherited by a forked process, and belongs to its parent";

// 0, or errno. The program may resize a storage under its copy, which unmaps the source: then this gives EFAULT,
// whereas a plain copy would end the process.
int copy_from_source(std::byte* target, const std::byte* source, uint64_t nbytes) {
  for (uint64_t done_bytes = 0; done_bytes < nbytes;) {
    const iovec local{target + done_bytes, nbytes - done_bytes};
    const iovec remote{const_cast<std::byte*>(source) + done_bytes, nbytes - done_bytes};
    const ssize_t moved = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (moved > 0) {
      done_bytes += static_cast<uint64_t>(moved);
    } else if (errno == ENOSYS || errno == EPERM) {  // a sandbox forbids the call
      std::memcpy(target + done_bytes, source + done_bytes, nbytes - done_bytes);
      return 0;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

Span block_aligned(Span span) { return {span.begin, span.begin + round_up(span.nbytes(), kDiskBlockBytes)}; }

}  // namespace

TransferBuffers::~TransferBuffers() {
  for (std::byte* buffer : idle_) munmap(buffer, kBufferBytes);
}

std::byte* TransferBuffers::try_acquire() {
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      std::byte* buffer = idle_.back();
      idle_.pop_back();
      return buffer;
    }
  }
  void* mapped = mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  madvise(mapped, kBufferBytes, MADV_DONTFORK);  // a child's copy-on-write would move the pages under a transfer
  return static_cast<std::byte*>(mapped);
}

void TransferBuffers::release(std::byte* buffer) {
  const MutexLock lock(mutex_);
  idle_.push_back(buffer);
}

SpillFile::SpillFile(std::string directory, std::function<void(Point)> synchronize, ChunkPolicy policy)
    : directory_(std::move(directory)),
      synchronize_(std::move(synchronize)),
      policy_(policy),
      file_(try_open(directory_)) {}

std::shared_ptr<SpillFile::File> SpillFile::try_open(const std::string& directory) {
  try {
    return std::make_shared<File>(directory);
  } catch (const OpenError& error) {
    if (!error.may_pass) throw;
    return nullptr;
  }
}

SpillFile::File::File(const std::string& directory)
    : cached(open_unlinked(directory)), direct(reopen_direct(cached)), uses_direct_io(direct.is_open()) {}

bool SpillFile::is_open() const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return file_ != nullptr;
}

bool SpillFile::uses_direct_io() const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return file_ != nullptr && file_->uses_direct_io;
}

void SpillFile::open_again() {
  if (file_in_turn() != nullptr) return;
  try {
    auto file = std::make_shared<File>(directory_);
    const MutexLock lock(mutex_);
    file_ = std::move(file);
  } catch (const std::runtime_error& error) {
    throw StoreFull(error.what());
  }
}

std::optional<Slot> SpillFile::try_acquire(uint64_t nbytes, std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return std::nullopt;
  const MutexLock lock(mutex_);
  const std::optional<Range> range = ranges_.try_acquire(nbytes, guards);
  if (!range) return std::nullopt;
  return Slot{*range, nullptr};
}

void SpillFile::grow(uint64_t nbytes) {
  if (fork_guard_.inherited()) throw StoreFull(kSpillFileInherited);
  require_sane_request(nbytes, "disk");
  const MutexLock growing(grow_mutex_);
  if (can_acquire(nbytes)) return;  // another thread grew it, or released a slot, meanwhile
  open_again();
  uint64_t chunk_bytes = policy_.chunk_bytes(nbytes, capacity_bytes(), kDiskBlockBytes);
  const uint64_t least_bytes = round_up(std::max<uint64_t>(nbytes, 1), kDiskBlockBytes);
  uint64_t begin = first_gap(chunk_bytes);
  try {
    reserve_disk({begin, begin + chunk_bytes});
  } catch (const StoreFull&) {
    if (least_bytes == chunk_bytes) throw;
    chunk_bytes = least_bytes;
    begin = first_gap(chunk_bytes);
    reserve_disk({begin, begin + chunk_bytes});
  }
  grow_count_.fetch_add(1, std::memory_order_relaxed);
  const MutexLock lock(mutex_);
  chunks_.emplace(ranges_.add_block(chunk_bytes), Span{begin, begin + chunk_bytes});
}

void SpillFile::release(const Slot& slot, const std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  ranges_.release(slot.range, guards);
}

uint64_t SpillFile::trim() {
  if (fork_guard_.inherited()) return 0;
  const MutexLock growing(grow_mutex_);
  const auto [idle, end] = take_idle_chunks();
  uint64_t released_bytes = 0;
  for (const Span& span : idle) {
    const bool is_tail = span.begin >= end;  // released by the truncation below
    if (is_tail || io_calls.punch_hole(file_in_turn()->cached.get(), static_cast<off_t>(span.begin),
                                       static_cast<off_t>(span.nbytes())) == 0) {
      released_bytes += span.nbytes();
    }
  }
  if (!idle.empty() && ftruncate(file_in_turn()->cached.get(), static_cast<off_t>(end)) != 0) return 0;
  close_if_empty();
  return released_bytes;
}

// The waits hold up no other thread. They come first, since the user may interrupt one.
SpillFile::Idle SpillFile::take_idle_chunks() {
  std::map<StreamId, uint64_t> reached;
  while (true) {
    std::vector<Point> busy;
    if (auto idle = try_take_idle_chunks(reached, busy)) return *std::move(idle);
    // The host waits for every guard: a late write would fill the hole again.
    for (const Point& guard : busy) {
      synchronize_(guard);
      reached[guard.stream] = std::max(reached[guard.stream], guard.serial);
    }
  }
}

std::optional<SpillFile::Idle> SpillFile::try_take_idle_chunks(const std::map<StreamId, uint64_t>& reached,
                                                               std::vector<Point>& busy) {
  const auto is_busy = [&](const Point& guard) {
    const auto known = reached.find(guard.stream);
    return known == reached.end() || known->second < guard.serial;
  };
  const MutexLock lock(mutex_);
  const auto blocks = ranges_.idle_blocks();
  for (const auto& [id, guards] : blocks) std::ranges::copy_if(guards, std::back_inserter(busy), is_busy);
  if (!busy.empty()) return std::nullopt;
  Idle taken;
  for (const auto& [id, guards] : blocks) {
    taken.chunks.push_back(chunks_.at(id));
    ranges_.remove_block(id);
    chunks_.erase(id);
  }
  for (const auto& [id, span] : chunks_) taken.end_of_others = std::max(taken.end_of_others, span.end);
  return taken;
}

// Every transfer touches a slot, and every slot is in a chunk: so no transfer needs the file any more.
void SpillFile::close_if_empty() {
  std::shared_ptr<File> file;  // closed after the lock is released: the system may take long over a large file
  const MutexLock lock(mutex_);
  if (chunks_.empty()) file = std::move(file_);
}

uint64_t SpillFile::capacity_bytes() const {
  if (fork_guard_.inherited()) return 0;
  const MutexLock lock(mutex_);
  return ranges_.capacity_bytes();
}

uint64_t SpillFile::used_bytes() const {
  if (fork_guard_.inherited()) return 0;
  const MutexLock lock(mutex_);
  return ranges_.used_bytes();
}

std::string SpillFile::write(const Slot& slot, const void* source, uint64_t nbytes, Memory memory) {
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(source));  // not written: the direction is Out
  return move(IoDirection::Out, slot, bytes, nbytes, memory);
}

std::string SpillFile::read(void* target, const Slot& slot, uint64_t nbytes, Memory memory) {
  return move(IoDirection::In, slot, static_cast<std::byte*>(target), nbytes, memory);
}

std::string SpillFile::move(IoDirection direction, const Slot& slot, std::byte* bytes, uint64_t nbytes, Memory memory) {
  if (fork_guard_.inherited()) return kSpillFileInherited;
  const auto [file, span] = locate(slot, nbytes);
  IoResult result;
  if (!try_move_direct(*file, direction, bytes, span, memory, result))
    result = move_cached(*file, direction, bytes, span);
  if (result.complete) return {};
  return describe(direction == IoDirection::Out ? "write" : "read", span, result);
}

bool SpillFile::try_move_direct(File& file, IoDirection direction, std::byte* bytes, Span span, Memory memory,
                                IoResult& result) {
  if (!file.uses_direct_io) return false;
  if (memory == Memory::Blocks) {
    result = move_fully(file.direct.get(), direction, bytes, span);
  } else {
    std::byte* const buffer = file.buffers.try_acquire();
    if (buffer == nullptr) return false;
    result = move_through_buffer(file, direction, bytes, span, buffer);
    file.buffers.release(buffer);
  }
  if (result.complete || result.error != EINVAL) return true;
  file.uses_direct_io.store(false, std::memory_order_relaxed);  // this file system takes the flag, and not the I/O
  return false;
}

IoResult SpillFile::move_through_buffer(const File& file, IoDirection direction, std::byte* bytes, Span span,
                                        std::byte* buffer) {
  IoResult result;
  result.complete = true;
  while (result.complete && result.done_bytes < span.nbytes()) {
    const uint64_t done_bytes = result.done_bytes;
    const uint64_t piece_bytes = std::min(span.nbytes() - done_bytes, TransferBuffers::kBufferBytes);
    const uint64_t padded_bytes = round_up(piece_bytes, kDiskBlockBytes);
    const Span piece{span.begin + done_bytes, span.begin + done_bytes + padded_bytes};
    if (direction == IoDirection::Out) {
      if (const int error = copy_from_source(buffer, bytes + done_bytes, piece_bytes))
        return {done_bytes, error, false};
      std::memset(buffer + piece_bytes, 0, padded_bytes - piece_bytes);
    }
    const IoResult moved = move_fully(file.direct.get(), direction, buffer, piece);
    const uint64_t moved_bytes = std::min(moved.done_bytes, piece_bytes);
    if (direction == IoDirection::In) std::memcpy(bytes + done_bytes, buffer, moved_bytes);
    result = {done_bytes + moved_bytes, moved.error, moved.complete};
  }
  return result;
}

// Written bytes are on the disk, and not in memory, before the transfer counts as done. The disk starts with each piece
// while the next one is copied, so that dirty pages do not pile up.
IoResult SpillFile::move_cached(const File& file, IoDirection direction, std::byte* bytes, Span span) {
  const int fd = file.cached.get();
  if (direction == IoDirection::In) {
    const IoResult result = move_fully(fd, direction, bytes, span);
    drop_pages(fd, block_aligned(span));
    return result;
  }
  IoResult result;
  result.complete = true;
  while (result.complete && result.done_bytes < span.nbytes()) {
    const uint64_t begin = span.begin + result.done_bytes;
    const Span piece{begin, std::min(span.end, begin + TransferBuffers::kBufferBytes)};
    const IoResult moved = move_fully(fd, direction, bytes + result.done_bytes, piece);
    result = {result.done_bytes + moved.done_bytes, moved.error, moved.complete};
    if (moved.complete) start_write_back(fd, piece);
  }
  if (!result.complete) return result;
  result.error = write_back_and_drop(fd, block_aligned(span));
  result.complete = result.error == 0;
  return result;
}

bool SpillFile::can_acquire(uint64_t nbytes) const {
  const MutexLock lock(mutex_);
  return ranges_.capacity_bytes() > 0 && ranges_.largest_free_bytes() >= std::max<uint64_t>(nbytes, 1);
}

uint64_t SpillFile::first_gap(uint64_t nbytes) const {
  std::vector<Span> taken;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, span] : chunks_) taken.push_back(span);
  }
  std::sort(taken.begin(), taken.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  uint64_t begin = 0;
  for (const Span& span : taken) {
    if (span.begin - begin >= nbytes) break;
    begin = span.end;
  }
  return begin;
}

void SpillFile::reserve_disk(Span span) const {
  const int file = file_in_turn()->cached.get();
  int error = 0;
  do {
    error = io_calls.reserve(file, static_cast<off_t>(span.begin), static_cast<off_t>(span.nbytes()));
  } while (error == EINTR);
  if (error == 0) return;
  // Part of it may have been reserved: no chunk uses it, so it goes back.
  io_calls.punch_hole(file, static_cast<off_t>(span.begin), static_cast<off_t>(span.nbytes()));
  throw StoreFull("cannot reserve " + std::to_string(span.nbytes()) + " bytes for " + name() + ": " +
                  std::strerror(error));
}

SpillFile::FileSpan SpillFile::locate(const Slot& slot, uint64_t nbytes) const {
  if (nbytes > slot.nbytes()) {
    throw std::logic_error("SpillFile: a transfer of " + std::to_string(nbytes) + " bytes in a slot of " +
                           std::to_string(slot.nbytes()));
  }
  const MutexLock lock(mutex_);
  const uint64_t begin = chunks_.at(slot.range.block).begin + slot.range.offset;
  return {file_, {begin, begin + nbytes}};
}

std::string SpillFile::describe(const char* what, Span span, const IoResult& result) const {
  return std::string(what) + " of " + std::to_string(span.nbytes()) + " bytes at offset " + std::to_string(span.begin) +
         " of " + name() + " failed after " + std::to_string(result.done_bytes) + " bytes: " + result.reason();
}

void SpillFile::check_invariants() const {
  const MutexLock lock(mutex_);
  ranges_.check_invariants();
  std::map<uint64_t, uint64_t> ends;
  uint64_t chunk_bytes = 0;
  for (const auto& [id, span] : chunks_) {
    ends.emplace(span.begin, span.end);
    chunk_bytes += span.nbytes();
  }
  if (chunk_bytes != ranges_.capacity_bytes()) throw std::logic_error("SpillFile: chunks and blocks differ");
  uint64_t previous_end = 0;
  for (const auto& [begin, end] : ends) {
    if (begin < previous_end) throw std::logic_error("SpillFile: two chunks overlap in the file");
    previous_end = end;
  }
}

}  // namespace torchoffload
