// SimWorld: simulated devices made of CPU memory: their streams, their copies, and a check of every access.
//
// Operators run on the host, when they are called: so they stand for a compute_stream of the simulated device. Copies
// wait in the queues of offload_stream and reload_stream and run when the mode says so. Whether two accesses are
// ordered is decided when they are enqueued, by vector clocks over the declared order (record, wait, synchronize), and
// so does not depend on the mode, the machine or luck. The mode decides which bytes a copy sees.
//
// Ownership:     one world for the process, running or at rest; SimBackend and SimAllocator give access to it.
// Thread safety: every method, any thread, with or without the GIL. One leaf mutex: no Python runs and no tensor dies
//                under it. current_stream() and current_device() are the calling thread's own.
// Stream order:  see wait(): the work that a compute_stream waits for has run when the call returns.
// Shutdown:      never destroyed: blocks outlive their simulation, and every static object.
// Not handled:   bytes that pass between operators; the user's own streams need the user's own waits.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/types.h"
#include "system/mutex.h"
#include "testing/sim_clock.h"
#include "testing/sim_memory.h"

namespace torchoffload {

// A missing wait: names both accesses and their streams.
struct RaceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// When a copy runs: at its enqueueing; when a compute_stream or the host waits for it, and nothing before its time; or
// after some later call, in an order that the waits allow and the seed picks.
enum class SimMode : uint8_t { Early, Late, Seeded };

// Host: the threads of disks, which touch slots at the moment of the call. Side: a stream that PyTorch was given, of the
// program or of ours: its copies queue, and operators may run on it too, once the queue has run.
enum class StreamRole : uint8_t { Compute, Offload, Reload, Host, Side };

struct SimOptions {
  SimMode mode = SimMode::Late;
  uint64_t seed = 0;
  int device_count = 1;
  uint64_t (*sequence_number)() = nullptr;  // the calling thread's autograd sequence number
};

class SimWorld {
 public:
  static SimWorld& instance();

  void start(const SimOptions& options);
  // Runs the commands that are still queued and gives the pools back. Blocks alive stay valid, and belong to no device.
  void stop();
  bool is_running() const;
  SimMode mode() const;             // Early while none is running
  uint64_t draw(uint64_t choices);  // a number below `choices` by the seed

  // Streams. A device's ids are the same in every simulation.
  StreamId stream_of(int device, StreamRole role);
  StreamId make_compute_stream(int device);
  // A compute_stream of the program's own: from destroy_stream() on, a call that names it is reported as a race is.
  StreamId make_external_stream(int device);
  void destroy_stream(StreamId stream);
  // One for the process: no later simulation gives it to another user.
  StreamId make_side_stream(int device);
  bool is_external(StreamId stream);
  bool is_compute(StreamId stream);
  StreamId current_stream(int device);
  int current_device();
  void set_current_stream(StreamId stream);  // and its device
  void set_current_device(int device);

  // The seam; see Backend. Each throws RaceError, also for a race found since in a free, which could not throw.
  Point record(StreamId stream);
  void wait(StreamId waiter, Point point);
  void copy_out(std::byte* slot, const void* source, uint64_t nbytes, StreamId stream);
  void copy_in(void* target, const std::byte* slot, uint64_t nbytes, StreamId stream);
  void note_use(const void* address, StreamId stream);
  void synchronize(Point point);
  void synchronize_device(int device);  // all its streams
  void saw_pack(const void* address, uint64_t nbytes, StreamId stream, uint64_t sequence_number);
  void saw_unpack(const void* address, uint64_t nbytes, StreamId stream);
  // An operator on `stream` reads or writes these bytes, now: the work that is queued there has run when the call
  // returns. It must come after the copies that wrote them. It is not remembered: whether operators of several streams
  // are in order is the program's business.
  void saw_operator(bool writes, const void* address, uint64_t nbytes, StreamId stream);
  // A disk's thread reads (out) or writes memory of a slot, now. It has waited on the host for earlier work.
  void saw_transfer(bool is_out, const void* address, uint64_t nbytes);
  // The calling thread is inside no operator: its packed bytes have been written.
  void end_operators();

  // Memory. allocate: on the current stream of `device`.
  void* allocate(uint64_t nbytes, int device, MemoryOwner owner);
  void free(void* address) noexcept;
  std::optional<int> device_index_of(const void* address);
  // The number of the allocation, from 1, and its stream; 0 and kNoStream for memory that is not simulated.
  std::pair<uint64_t, StreamId> origin_of(const void* address);
  size_t user_count(const void* address);  // the streams that note_use() told of
  void set_tells_origins(bool tells);      // false: as an allocator that tells nothing, until the next start()
  // A write to this memory that the engine does not see, on `stream`.
  void fill(const void* address, uint64_t nbytes, StreamId stream);
  // Host memory goes back to the system: every access must have happened before the host.
  void register_host_memory(void* address, uint64_t nbytes);
  bool unregister_host_memory(void* address);  // false: it was never registered

  std::vector<std::string> races() const;  // all since start(), the first first
  void clear_races();
  uint64_t allocated_bytes(int device) const;
  uint64_t peak_bytes(int device) const;
  uint64_t take_peak_bytes(int device);  // and begin anew with what is allocated
  uint64_t queued_count() const;         // copies and waits that have not run
  uint64_t access_count() const;         // remembered; for tests that it stays bounded

 private:
  enum class CommandKind : uint8_t { CopyOut, CopyIn, Wait };
  struct Command {
    CommandKind kind = CommandKind::Wait;
    Point point;  // Wait
    std::byte* target = nullptr;
    const std::byte* source = nullptr;
    uint64_t nbytes = 0;
  };
  struct Snapshot {
    VectorClock clock;
    uint64_t command_count = 0;  // enqueued before the point
  };
  struct Stream {
    StreamId id = kNoStream;
    uint32_t index = 0;
    int device = 0;
    StreamRole role = StreamRole::Compute;
    std::string name;
    VectorClock clock;
    uint64_t reached_serial = 0;      // points of earlier simulations
    std::vector<Snapshot> snapshots;  // of the points after it
    std::deque<Command> queue;
    uint64_t run_count = 0;
    bool is_external = false;
    bool is_destroyed = false;
  };
  struct Device {
    std::vector<uint32_t> compute;  // dense indices; the first is the default
    uint32_t offload = 0;
    uint32_t reload = 0;
    size_t compute_in_use = 1;
  };
  struct PendingWrite {
    Span span;
    uint32_t stream = 0;
    uint64_t thread = 0;
    uint64_t sequence_number = 0;
  };

  SimWorld() = default;

  // sim_world.cpp
  uint32_t add_stream(int device, StreamRole role, const std::string& name) REQUIRES(mutex_);
  Device& device(int index) REQUIRES(mutex_);
  Stream& stream(StreamId id) REQUIRES(mutex_);
  Stream& used(StreamId id) REQUIRES(mutex_);              // by a call
  const Snapshot* snapshot(Point point) REQUIRES(mutex_);  // null: reached before this simulation
  void run(Stream& stream, uint64_t command_count) REQUIRES(mutex_);
  void carry_out(const Command& command) REQUIRES(mutex_);
  void run_to(Point point) REQUIRES(mutex_);
  void run_all() REQUIRES(mutex_);
  void run_some() REQUIRES(mutex_);
  void enqueue(Stream& stream, const Command& command) REQUIRES(mutex_);

  // sim_checks.cpp
  void begin_call() REQUIRES(mutex_);
  void end_call() REQUIRES(mutex_);
  void commit_ended_operators() REQUIRES(mutex_);
  void access(Stream& stream, AccessKind kind, MemoryOwner owner, const void* address, uint64_t nbytes)
      REQUIRES(mutex_);
  void check_no_open_operator(Stream& stream, const Span& span) REQUIRES(mutex_);
  MemoryOwner require_block(Stream& stream, AccessKind kind, const void* address, uint64_t nbytes) REQUIRES(mutex_);
  void report(std::string text) REQUIRES(mutex_);
  std::string describe(const Access& access) const REQUIRES(mutex_);

  mutable Mutex mutex_;
  bool running_ GUARDED_BY(mutex_) = false;
  bool tells_origins_ GUARDED_BY(mutex_) = true;
  SimOptions options_ GUARDED_BY(mutex_);
  uint64_t simulation_ GUARDED_BY(mutex_) = 0;  // counts from 1
  std::mt19937_64 random_ GUARDED_BY(mutex_);
  std::deque<Stream> streams_ GUARDED_BY(mutex_);  // by dense index; never shrinks
  std::map<StreamId, uint32_t> index_of_ GUARDED_BY(mutex_);
  std::deque<Device> devices_ GUARDED_BY(mutex_);
  SimHeap heap_ GUARDED_BY(mutex_);
  AccessMap accesses_ GUARDED_BY(mutex_);
  VectorClock host_clock_ GUARDED_BY(mutex_);
  std::optional<uint32_t> disk_threads_ GUARDED_BY(mutex_);  // the index of the stream that stands for them
  std::vector<PendingWrite> pending_ GUARDED_BY(mutex_);
  std::map<void*, uint64_t> host_memory_ GUARDED_BY(mutex_);  // registered
  std::vector<std::string> races_ GUARDED_BY(mutex_);
  size_t races_thrown_ GUARDED_BY(mutex_) = 0;
};

}  // namespace torchoffload
