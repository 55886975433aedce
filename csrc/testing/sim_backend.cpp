#include "testing/sim_backend.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "device/torch_memory.h"
#include "system/mutex.h"
#include "testing/logging_backend.h"

namespace torchoffload {

namespace {

SimWorld& world() { return SimWorld::instance(); }

void free_simulated(void* address) { world().free(address); }

// Storages remember their allocator, so this one is also called after its simulation, and then calls the former one.
class SimAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (!world().is_running()) return former_->allocate(nbytes);
    void* const address =
        nbytes == 0 ? nullptr : world().allocate(nbytes, world().current_device(), MemoryOwner::Source);
    return {address, address, &free_simulated, c10::Device(c10::kCPU)};
  }
  // Operators take scratch memory this way too, and give it back before they return.
  c10::DeleterFnPtr raw_deleter() const override { return &free_simulated; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

  void install() {
    former_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this, kPriority);
  }
  void remove() { c10::SetCPUAllocator(former_, kPriority); }

 private:
  static constexpr uint8_t kPriority = UINT8_MAX;  // equal is enough to replace, lower is not
  c10::Allocator* former_ = nullptr;
};

// Never destroyed: storages hold a pointer to it.
SimAllocator& allocator() {
  static SimAllocator* const instance = new SimAllocator;
  return *instance;
}

// Never destroyed. An arena's own thread uses it as well.
Mutex& refusal_mutex() {
  static auto* const mutex = new Mutex;
  return *mutex;
}

// Empty: registering works.
std::string& registration_refusal() REQUIRES(refusal_mutex()) {
  static auto* const refusal = new std::string;
  return *refusal;
}

struct LoggedDevice {
  explicit LoggedDevice(int device_index)
      : device(device_index), logged(device.with(simulated_arena()), device_index), backend(logged.parts()) {}
  SimBackend device;
  LoggingBackend logged;
  const Backend backend;
};

}  // namespace

StreamId SimBackend::current_stream() { return world().current_stream(device_index_); }
StreamId SimBackend::offload_stream() { return world().stream_of(device_index_, StreamRole::Offload); }
StreamId SimBackend::reload_stream() { return world().stream_of(device_index_, StreamRole::Reload); }

Point SimBackend::record(StreamId stream) {
  const Point point = world().record(stream);
  if (!tells_time()) return point;
  const MutexLock lock(mutex_);
  points_s_[{stream, point.serial}] = clock_s(stream);
  return point;
}

void SimBackend::wait(StreamId waiter, Point point) {
  world().wait(waiter, point);
  const MutexLock lock(mutex_);
  const auto found = points_s_.find({point.stream, point.serial});
  if (found == points_s_.end()) return;
  double& clock = clock_s(waiter);
  clock = std::max(clock, found->second);
}

void SimBackend::synchronize(Point point) { world().synchronize(point); }

PointStatus SimBackend::status(Point) {
  throw std::logic_error("status() was asked of a device whose copies do not complete in the background");
}

Memory SimBackend::allocate(uint64_t nbytes, uint64_t address_modulo) {
  void* const block = world().allocate(nbytes + address_modulo, device_index_, MemoryOwner::Buffer);
  std::byte* const first = static_cast<std::byte*>(block) + address_modulo;
  return make_memory({first, block, &free_simulated, c10::Device(c10::kCPU)}, nbytes);
}

void SimBackend::copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) {
  take_link(stream, nbytes);
  world().copy_out(slot.address, source, nbytes, stream);
}

void SimBackend::copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) {
  take_link(stream, nbytes);
  world().copy_in(target, slot.address, nbytes, stream);
}

bool SimBackend::owns(MemoryRef memory) const {
  return storage_impl(memory).data_ptr().get_deleter() == &free_simulated;
}

void SimBackend::note_use(MemoryRef memory, StreamId stream) {
  if (owns(memory)) world().note_use(memory.data(), stream);
}

MemoryOrigin SimBackend::origin_of(MemoryRef memory) {
  const auto [allocation, stream] = world().origin_of(memory.data());
  return {allocation, stream};
}

void SimBackend::saw_pack(const void* address, uint64_t nbytes, StreamId stream, uint64_t sequence_number) {
  world().saw_pack(address, nbytes, stream, sequence_number);
}

void SimBackend::saw_unpack(const void* address, uint64_t nbytes, StreamId stream) {
  world().saw_unpack(address, nbytes, stream);
}

void SimBackend::saw_operators_end() { world().end_operators(); }

bool SimBackend::tells_time() const {
  const MutexLock lock(mutex_);
  return link_bytes_per_s_ > 0;
}

TimedPoint SimBackend::record_timed(StreamId stream) {
  if (!tells_time()) return {};
  const MutexLock lock(mutex_);
  timed_s_.push_back(clock_s(stream));
  return {static_cast<uint32_t>(timed_s_.size())};
}

std::optional<double> SimBackend::seconds_between(TimedPoint from, TimedPoint to) {
  const MutexLock lock(mutex_);
  return timed_s_.at(to.id - 1) - timed_s_.at(from.id - 1);
}

bool SimBackend::is_lasting(StreamId stream) { return !world().is_external(stream); }

uint64_t SimBackend::allocated_bytes() { return world().allocated_bytes(device_index_); }

void SimBackend::set_link(double bytes_per_s) {
  const MutexLock lock(mutex_);
  link_bytes_per_s_ = bytes_per_s;
  if (bytes_per_s <= 0) points_s_.clear();
}

void SimBackend::advance(double seconds) {
  const MutexLock lock(mutex_);
  now_s_ += seconds;
}

// A stream of ours goes on from the end of its work, and not before the host gives it more.
double& SimBackend::clock_s(StreamId stream) {
  if (world().is_compute(stream)) return now_s_;
  double& copied_s = copied_s_[stream];
  copied_s = std::max(copied_s, now_s_);
  return copied_s;
}

void SimBackend::take_link(StreamId stream, uint64_t nbytes) {
  const MutexLock lock(mutex_);
  if (link_bytes_per_s_ > 0) clock_s(stream) += static_cast<double>(nbytes) / link_bytes_per_s_;
}

void start_simulation(SimOptions options) {
  if (options.sequence_number == nullptr) options.sequence_number = &at::sequence_number::peek;
  world().start(options);
  allocator().install();
}

void stop_simulation() {
  if (!world().is_running()) throw std::logic_error("no simulation is running");
  allocator().remove();
  world().stop();
}

SimWorld* active_simulation() { return world().is_running() ? &world() : nullptr; }

namespace {

LoggedDevice& logged_device(int device_index) {
  static Mutex* const mutex = new Mutex;
  static auto* const devices = new std::deque<LoggedDevice>;
  const MutexLock lock(*mutex);
  while (static_cast<int>(devices->size()) <= device_index) {
    devices->emplace_back(static_cast<int>(devices->size()));
  }
  return (*devices)[static_cast<size_t>(device_index)];
}

}  // namespace

PinnedArena& simulated_arena() {
  static auto* const arena = new PinnedArena({simulated_register, simulated_unregister},
                                             [](Point point) { simulated_backend(0).streams.synchronize(point); });
  return *arena;
}

const Backend& simulated_backend(int device_index) { return logged_device(device_index).backend; }
SimBackend& simulated_device(int device_index) { return logged_device(device_index).device; }

const Backend* simulated_backend_for(const void* data) {
  const auto device_index = world().device_index_of(data);
  return device_index ? &simulated_backend(*device_index) : nullptr;
}

void refuse_registration(std::string why) {
  const MutexLock lock(refusal_mutex());
  registration_refusal() = std::move(why);
}

std::string simulated_register(void* address, size_t nbytes) {
  {
    const MutexLock lock(refusal_mutex());
    if (!registration_refusal().empty()) return registration_refusal();
  }
  world().register_host_memory(address, nbytes);
  return {};
}

std::string simulated_unregister(void* address) {
  return world().unregister_host_memory(address) ? "" : "this memory was never registered";
}

}  // namespace torchoffload
