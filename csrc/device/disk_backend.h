// DiskBackend: CPU memory to a spill file and back. The host is the compute stream; two I/O queues are the other two.
// Ownership:     owns its spill file and its queues. It touches a copy's memory until the copy's point is reached: the
//                engine holds it until then.
// Thread safety: every method, any thread; none touches Python, so those that block are called without the GIL.
// Stream order:  offload_stream() and reload_stream() keep order as CUDA streams do; see Note [I/O streams]. A wait of
//                the host's stream blocks the calling thread. A point of the host's stream is always reached.
// Shutdown:      leaked on purpose; see Note [No CUDA after main]. Its threads are stopped with the process, at any
//                point of their work: they touch only the file, the memory that they copy and their queue, none of
//                which is destroyed.
// Not handled:   CUDA tensors.
#pragma once

#include <map>
#include <string>

#include "device/backend.h"
#include "storage/io_queue.h"
#include "storage/spill_file.h"
#include "system/mutex.h"

namespace torchoffload {

struct DiskBackendOptions {
  unsigned offload_thread_count = 2;
  unsigned reload_thread_count = 2;
  ChunkPolicy chunks;
};

class DiskBackend final : public DeviceMemory, public Streams, public Link {
 public:
  // Throws std::runtime_error when no spill file can be made in `directory`. Threads start with the first copy.
  explicit DiskBackend(std::string directory, DiskBackendOptions options = {});

  // Waits for every copy: for tests, since the backends of a process are never destroyed.
  ~DiskBackend() override;

  SpillFile& store() { return store_; }
  Backend parts() { return {.device = "cpu", .memory = *this, .streams = *this, .link = *this, .store = store_}; }

  // Is no slot in use, and no copy on its way? False in a forked child of the process that made the backend.
  bool is_idle() const;

  // Releases unused resources: space on the disk, the file once it is empty, and the threads. The next copy makes them
  // anew. Returns the bytes of disk released. May block. Other threads may copy meanwhile.
  uint64_t trim() EXCLUDES(gil);

  StreamId current_stream() override { return host_; }
  StreamId offload_stream() override { return offload_; }
  StreamId reload_stream() override { return reload_; }

  Point record(StreamId stream) override;
  void wait(StreamId waiter, Point point) override;
  Memory allocate(uint64_t nbytes, uint64_t address_modulo) override;

  // A copy on the host's stream blocks, and is done when the call returns.
  void copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) override;
  void copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) override;

  void note_use(MemoryRef, StreamId) override {}
  MemoryOrigin origin_of(MemoryRef memory) override;
  void synchronize(Point point) override;
  PointStatus status(Point point) override;
  std::string failure(Point point) override;
  void forget(Point point) override;
  // Also of the host's stream, for which asking costs nothing: each of its points was reached before it was known.
  Completion completion(StreamId) const override { return Completion::ByPolling; }
  bool may_block(StreamId stream) const override { return stream == host_; }

 private:
  IoQueue& queue_of(StreamId stream);
  void copy(const IoJob& job, StreamId stream);
  std::string transfer(const IoJob& job);

  const ForkGuard fork_guard_;
  const StreamId host_ = next_stream_id();
  const StreamId offload_ = next_stream_id();
  const StreamId reload_ = next_stream_id();
  SpillFile store_;

  Mutex host_mutex_;
  uint64_t host_copy_count_ GUARDED_BY(host_mutex_) = 0;
  std::map<uint64_t, std::string> host_failures_ GUARDED_BY(host_mutex_);  // by serial

  IoQueue offload_queue_;
  IoQueue reload_queue_;
};

}  // namespace torchoffload
