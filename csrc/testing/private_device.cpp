#include "testing/private_device.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "system/mutex.h"

namespace torchoffload {

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

std::atomic<bool> is_simulating = false;
std::atomic<bool> guard_has_streams = true;
std::atomic<bool> guard_has_events = true;

// ---- memory of the device ----

void free_device_memory(void* address) { private_world().free(address); }

class PrivateAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const int device = private_world().current_device();
    void* const address = nbytes == 0 ? nullptr : private_world().allocate(nbytes, device, MemoryOwner::Source);
    return {address, address, &free_device_memory, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  // As caching allocators do: only memory with their own deleter is known to be theirs.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() == &free_device_memory) private_world().note_use(data.get(), simulated_stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats statistics;
    auto& allocated = statistics.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    allocated.current = static_cast<int64_t>(private_world().allocated_bytes(device));
    allocated.peak = static_cast<int64_t>(private_world().peak_bytes(device));
    return statistics;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

PrivateAllocator& device_allocator() {
  static auto* const leaked = new PrivateAllocator;
  return *leaked;
}

// ---- page-locked memory ----

class PrivateHostAllocator final : public at::HostAllocator {
 public:
  static PrivateHostAllocator& instance() {
    static auto* const leaked = new PrivateHostAllocator;
    return *leaked;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::kCPU);
    if (nbytes == 0) return {nullptr, nullptr, &release, cpu};
    {
      const MutexLock lock(mutex_);
      TORCH_CHECK(refusal_.empty(), refusal_);
    }
    const uint64_t rounded = round_up(nbytes, kAlignmentBytes);
    auto* const address = static_cast<std::byte*>(std::aligned_alloc(kAlignmentBytes, rounded));
    if (address == nullptr) throw std::bad_alloc();
    private_world().register_host_memory(address, rounded);
    const MutexLock lock(mutex_);
    blocks_[address] = {rounded, {}};
    return {address, address, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

  // The memory is waited for when it is freed. It is known by its context alone: a tensor on a part of it has none.
  bool record_event(void*, void* context, c10::Stream stream) override {
    const MutexLock lock(mutex_);
    const auto block = blocks_.find(static_cast<std::byte*>(context));
    if (block != blocks_.end()) block->second.users.insert(simulated_stream_of(stream));
    return block != blocks_.end();
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool has(const void* address) {
    const MutexLock lock(mutex_);
    return find(address) != nullptr;
  }

  void refuse(std::string why) {
    const MutexLock lock(mutex_);
    refusal_ = std::move(why);
  }

 private:
  struct Block {
    uint64_t nbytes = 0;
    std::set<StreamId> users;
  };

  static void release(void* address) {
    if (address != nullptr) instance().free(static_cast<std::byte*>(address));
  }

  void free(std::byte* address) {
    std::set<StreamId> users;
    {
      const MutexLock lock(mutex_);
      users = std::move(blocks_.at(address).users);
      blocks_.erase(address);
    }
    for (const StreamId user : users) private_world().synchronize(private_world().record(user));
    private_world().unregister_host_memory(address);
    std::free(address);
  }

  Block* find(const void* address) REQUIRES(mutex_) {
    const auto* const wanted = static_cast<const std::byte*>(address);
    const auto after = blocks_.upper_bound(wanted);
    if (after == blocks_.begin()) return nullptr;
    const auto found = std::prev(after);
    return wanted < found->first + found->second.nbytes ? &found->second : nullptr;
  }

  Mutex mutex_;
  std::map<const std::byte*, Block> blocks_ GUARDED_BY(mutex_);
  std::string refusal_ GUARDED_BY(mutex_);
};

// ---- streams and events ----

struct PrivateGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(private_world().current_device()));
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) private_world().set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kPrivateDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return torch_stream_of(private_world().current_stream(index), index);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, static_cast<c10::DeviceIndex>(index_of(device))));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    if (!guard_has_streams) return getDefaultStream(device);
    const int index = index_of(device);
    return torch_stream_of(private_world().make_side_stream(index), index);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    const int device = private_world().current_device();
    private_world().set_current_stream(simulated_stream_of(stream));
    private_world().set_current_device(device);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    private_world().synchronize(private_world().record(simulated_stream_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { (void)queryStream(stream); }
  void synchronizeDevice(c10::DeviceIndex index) const override { private_world().synchronize_device(index); }

  // An event's object is another one each time that it is recorded, as some devices have it: a user of the former one
  // would touch freed memory.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    TORCH_CHECK(guard_has_events, "the simulated device has no events now");
    auto* const before = static_cast<Point*>(*event);
    *event = new Point(private_world().record(simulated_stream_of(stream)));
    destroy(before);
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait(simulated_stream_of(stream), *static_cast<Point*>(event));
  }
  // The device has gone on until there when it is asked: nothing else lets a thread that asks go on.
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override { private_world().synchronize(*static_cast<Point*>(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { destroy(static_cast<Point*>(event)); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

 private:
  static void wait(StreamId waiter, Point point) { private_world().wait(waiter, point); }
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : private_world().current_device();
  }
  static void destroy(Point* point) {
    if (point == nullptr) return;
    *point = {};  // names no stream: a later use is reported
    delete point;
  }
};

// ---- questions of PyTorch's ----

struct PrivateHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_simulating; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kPrivateDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { private_world().set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(private_world().current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return PrivateHostAllocator::instance().has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PrivateHostAllocator::instance(); }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto index = private_world().device_index_of(data);
    TORCH_CHECK(index, "this memory belongs to no simulated device");
    return at::Device(kType, static_cast<c10::DeviceIndex>(*index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::StorageImpl& resized = *storage.unsafeGetStorageImpl();
    c10::DataPtr data = resized.allocator()->allocate(nbytes);
    const size_t kept_bytes = std::min(nbytes, resized.nbytes());
    if (kept_bytes > 0) std::memcpy(data.get(), resized.data(), kept_bytes);
    resized.set_data_ptr_noswap(std::move(data));
    resized.set_nbytes(nbytes);
  }
};

}  // namespace

StreamId simulated_stream_of(c10::Stream stream) {
  if (stream.id() != 0) return static_cast<StreamId>(stream.id() - 1);
  return private_world().stream_of(stream.device_index(), StreamRole::Compute);
}

c10::Stream torch_stream_of(StreamId stream, int device_index) {
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(device_index));
  if (stream == private_world().stream_of(device_index, StreamRole::Compute))
    return c10::Stream(c10::Stream::DEFAULT, device);
  return c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(stream) + 1);
}

void register_private_devices() {
  static std::once_flag once;
  std::call_once(once, [] {
    SimOptions options;
    options.device_count = kPrivateDevices;
    options.sequence_number = &at::sequence_number::peek;
    private_world().start(options);  // makes the devices
    private_world().stop();
    c10::SetAllocator(kType, &device_allocator());
    at::setHostAllocator(kType, &PrivateHostAllocator::instance());
    at::RegisterPrivateUse1HooksInterface(new PrivateHooks);
    const c10::impl::DeviceGuardImplRegistrar registered(kType, new PrivateGuard);
  });
}

void start_private_simulation(SimOptions options) {
  register_private_devices();
  options.device_count = kPrivateDevices;
  if (options.sequence_number == nullptr) options.sequence_number = &at::sequence_number::peek;
  private_world().start(options);
  is_simulating = true;
}

void stop_private_simulation() {
  is_simulating = false;
  private_world().stop();
}

void set_private_streams(bool has_streams) { guard_has_streams = has_streams; }
void set_private_events(bool has_events) { guard_has_events = has_events; }
void refuse_private_host_memory(std::string why) { PrivateHostAllocator::instance().refuse(std::move(why)); }

}  // namespace torchoffload
