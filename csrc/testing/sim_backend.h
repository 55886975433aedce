// SimBackend: the parts of one simulated device, and the allocator that makes tensors belong to it.
// Ownership:     backends live for the process, one for each device index; see SimWorld for the memory.
// Thread safety: every method, any thread; see SimWorld.
// Stream order:  as Streams; a copy on a compute_stream runs at once.
// Shutdown:      nothing is destroyed; see Note [No CUDA after main].
//
// It is part of the test build only.
//
// While a simulation runs, SimAllocator stands in for the process's CPU allocator: each CPU tensor allocated then is on
// the allocating thread's current simulated device. Older tensors, and memory that came from elsewhere, are on none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/backend.h"
#include "storage/pinned_arena.h"
#include "system/mutex.h"
#include "testing/sim_world.h"

namespace torchoffload {

class SimBackend final : public DeviceMemory, public Streams, public Link, public Observer {
 public:
  explicit SimBackend(int device_index) : device_index_(device_index) {}

  Backend with(SlotStore& store) {
    return {.device = "cpu", .memory = *this, .streams = *this, .link = *this, .store = store, .observer = *this};
  }

  StreamId current_stream() override;
  StreamId offload_stream() override;
  StreamId reload_stream() override;
  Point record(StreamId stream) override;
  void wait(StreamId waiter, Point point) override;
  Memory allocate(uint64_t nbytes, uint64_t address_modulo) override;
  void copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) override;
  void copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) override;
  bool owns(MemoryRef memory) const override;
  void note_use(MemoryRef memory, StreamId stream) override;
  MemoryOrigin origin_of(MemoryRef memory) override;
  void synchronize(Point point) override;
  PointStatus status(Point point) override;
  bool tells_time() const override;
  TimedPoint record_timed(StreamId stream) override;
  std::optional<double> seconds_between(TimedPoint from, TimedPoint to) override;
  uint64_t allocated_bytes() override;
  bool is_lasting(StreamId stream) override;
  Completion completion(StreamId) const override { return Completion::ByStreamOrder; }
  bool may_block(StreamId) const override { return true; }  // as on CUDA
  void saw_pack(const void* address, uint64_t nbytes, StreamId stream, uint64_t sequence_number) override;
  void saw_unpack(const void* address, uint64_t nbytes, StreamId stream) override;
  void saw_operators_end() override;

  // Simulated time: computing takes the time given to advance(), a copy its bytes over the rate, and a wait until its
  // point. All compute_streams share one clock. A rate of 0, as at first: this device tells no time.
  void set_link(double bytes_per_s);
  void advance(double seconds);

 private:
  void take_link(StreamId stream, uint64_t nbytes);
  double& clock_s(StreamId stream) REQUIRES(mutex_);

  const int device_index_;
  mutable Mutex mutex_;
  double link_bytes_per_s_ GUARDED_BY(mutex_) = 0;
  double now_s_ GUARDED_BY(mutex_) = 0;                     // of computing
  std::map<StreamId, double> copied_s_ GUARDED_BY(mutex_);  // when the work of a stream of ours ends
  std::map<std::pair<StreamId, uint64_t>, double> points_s_ GUARDED_BY(mutex_);  // by stream and serial
  std::vector<double> timed_s_ GUARDED_BY(mutex_);                               // by TimedPoint::id, less one
};

// Starts the world and puts SimAllocator in. `options.sequence_number` null: autograd's own.
void start_simulation(SimOptions options);
// Puts the former allocator back, and stops the world. Races stay readable until the next start.
void stop_simulation();

// The running simulation, or null.
SimWorld* active_simulation();

// The arena with the slots of all simulated devices.
PinnedArena& simulated_arena();

// The backend (logged; see LoggingBackend) of the device that the memory at `data` belongs to, or null.
const Backend* simulated_backend_for(const void* data);
const Backend& simulated_backend(int device_index);
SimBackend& simulated_device(int device_index);

// The refusal that simulated_register answers from here on; empty: it registers.
void refuse_registration(std::string why);

// For PinnedArena: see HostRegistration.
std::string simulated_register(void* address, size_t nbytes);
std::string simulated_unregister(void* address);

}  // namespace torchoffload
