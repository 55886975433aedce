#include "device/generic_backend.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Tensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

#include "core/mutant.h"
#include "device/generic_streams.h"
#include "device/refilled_memory.h"
#include "device/torch_memory.h"
#include "system/mutex.h"

namespace torchoffload {

namespace {

using c10::impl::VirtualGuardImpl;

// Operators that are called in this scope go straight to the kernel of their device.
class BelowDispatch {
 public:
  BelowDispatch()
      : keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), c10::DispatchKeySet(c10::DispatchKeySet::FULL)
                                                                        .remove(c10::DispatchKey::Dense)
                                                                        .remove(c10::DispatchKey::BackendSelect)) {}

 private:
  const c10::impl::ForceDispatchKeyGuard keys_;
  const at::DisableRecordFunctionGuard not_recorded_;
};

// A tensor of bytes on memory that it does not own. at::from_blob would make a plain storage, where some devices have
// storages of a class of their own.
at::Tensor bytes_at(const void* address, uint64_t nbytes, c10::Device device) {
  c10::DataPtr data(const_cast<void*>(address), device);
  auto storage = c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(nbytes)),
                                        std::move(data), /*allocator=*/nullptr, /*resizable=*/false, device);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                               options.computeDispatchKey(), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(nbytes)});
  return tensor;
}

template <typename Guard>
bool is_capturing_stream(const Guard& guard, c10::Stream stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) return guard.isStreamCapturing(stream);
  return false;  // this PyTorch does not tell
}

// A new stream of the device; some guards know only their pool.
c10::Stream new_stream(const VirtualGuardImpl& guard, c10::Device device) {
  try {
    return guard.getNewStream(device);
  } catch (const c10::Error&) {
    return guard.getStreamFromGlobalPool(device);
  }
}

class GenericDevice final : public DeviceMemory, public Streams, public Link {
 public:
  explicit GenericDevice(c10::Device device)
      : device_(device),
        guard_(device.type()),
        allocator_(c10::GetAllocator(device.type())),
        deleter_(usual_deleter()),
        timed_(device.type()),
        host_(next_stream_id()) {
    obstacle_ = find_streams();
    if (!obstacle_.empty()) offload_ = next_stream_id(), reload_ = next_stream_id();
    tells_time_ = obstacle_.empty() && finds_time();
  }

  Backend with(SlotStore& store) {
    return {.device = device_.str(), .memory = *this, .streams = *this, .link = *this, .store = store};
  }

  // Why copies are not made beside the computation; empty: they are, as far as is known.
  const std::string& obstacle() const { return obstacle_; }
  const c10::Device& device() const { return device_; }

  // ---- streams ----

  StreamId offload_stream() override { return offload_; }
  StreamId reload_stream() override { return reload_; }
  bool copies_at_once() const override { return !obstacle_.empty(); }

  StreamId current_stream() override {
    if (copies_at_once()) return host_;
    const c10::Stream current = guard_.getStream(device_);
    thread_local std::pair<std::optional<c10::Stream>, StreamId> latest{std::nullopt, kNoStream};
    if (!latest.first || *latest.first != current) latest = {current, GenericStreams::instance().id_of(current)};
    return latest.second;
  }

  // A device that copies at once has points only to be waited for on the host: their number does not matter.
  Point record(StreamId stream) override {
    if (copies_at_once()) return {stream, ++points_at_once_};
    return {stream, GenericStreams::instance().at(stream).record()};
  }

  void wait(StreamId waiter, Point point) override {
    if (mutated(Mutant::GenericStreamWaits)) return;
    if (copies_at_once()) return wait_for_device(point);
    const c10::Stream waiting = GenericStreams::instance().at(waiter).torch_stream();
    GenericStreams::instance().at(point.stream).with_event_of(point.serial, [&](const c10::Event& event) {
      event.block(waiting);
    });
  }

  void synchronize(Point point) override {
    if (copies_at_once()) return wait_for_device(point);
    generic_synchronize(point);
  }

  PointStatus status(Point) override {
    TORCH_INTERNAL_ASSERT(false, "a step on an accelerator never asks for a point's status");
  }

  Completion completion(StreamId) const override { return Completion::ByStreamOrder; }
  bool may_block(StreamId) const override { return true; }

  bool is_capturing() override { return !copies_at_once() && is_capturing_stream(guard_, guard_.getStream(device_)); }
  bool is_capturing_on(StreamId stream) override {
    return !copies_at_once() && is_capturing_stream(guard_, GenericStreams::instance().at(stream).torch_stream());
  }

  bool tells_time() const override { return tells_time_; }
  TimedPoint record_timed(StreamId stream) override {
    return tells_time_ ? timed_.record(GenericStreams::instance().at(stream).torch_stream()) : TimedPoint{};
  }
  std::optional<double> seconds_between(TimedPoint from, TimedPoint to) override {
    return timed_.seconds_between(from, to);
  }
  void release(TimedPoint point) override { timed_.release(point); }

  // ---- memory ----

  Memory allocate(uint64_t nbytes, uint64_t address_modulo) override {
    const c10::DeviceGuard on_device(device_);
    const bool is_aligned = is_aligned_.load(std::memory_order_relaxed);
    c10::DataPtr base = allocator_->allocate(nbytes + (is_aligned ? address_modulo : kAlignmentBytes));
    auto* const first = static_cast<std::byte*>(base.get());
    const uint64_t shift = (address_modulo - reinterpret_cast<uint64_t>(first)) % kAlignmentBytes;
    if (is_aligned && shift != address_modulo) {  // found out once: its allocations begin anywhere
      is_aligned_.store(false, std::memory_order_relaxed);
      base.clear();
      return allocate(nbytes, address_modulo);
    }
    if (shift == 0) return storage_of(std::move(base), nbytes);
    return storage_of(shifted(std::move(base), shift), nbytes);
  }

  // Recognises the memory by the deleter that the allocator's memory has.
  bool owns(MemoryRef memory) const override { return whole_allocation(memory).get_deleter() == deleter_; }

  void note_use(MemoryRef memory, StreamId stream) override {
    if (copies_at_once() || !owns(memory) || mutated(Mutant::GenericNotesUse)) return;
    guard_.recordDataPtrOnStream(whole_allocation(memory), GenericStreams::instance().at(stream).torch_stream());
  }

  MemoryOrigin origin_of(MemoryRef memory) override {
    return {owns(memory) ? number_of_allocation(storage_impl(memory)) : 0, kNoStream};
  }

  uint64_t allocated_bytes() override {
    auto* const telling = dynamic_cast<c10::DeviceAllocator*>(allocator_);
    if (telling == nullptr) return 0;
    try {
      const auto statistics = telling->getDeviceStats(device_.index());
      return static_cast<uint64_t>(
          statistics.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
    } catch (const c10::Error&) {
      return 0;
    }
  }

  // ---- link ----

  void copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) override {
    copy(slot.address, c10::Device(c10::kCPU), source, device_, nbytes, stream);
  }

  void copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) override {
    copy(target, device_, slot.address, c10::Device(c10::kCPU), nbytes, stream);
  }

 private:
  c10::DeleterFnPtr usual_deleter() const {
    const c10::DeviceGuard on_device(device_);
    const c10::DataPtr probe = allocator_->allocate(kAlignmentBytes);
    if (probe.get() == nullptr || probe.get_context() == nullptr)
      throw std::runtime_error("torchoffload: the allocator of " + device_.str() +
                               " gives memory that no address or owner is known of, so its tensors cannot be moved.");
    return probe.get_deleter();
  }

  // Makes the streams of ours. Returns the obstacle; empty: there is none.
  std::string find_streams() {
    try {
      const c10::Stream offload = new_stream(guard_, device_);
      const c10::Stream reload = new_stream(guard_, device_);
      const c10::Stream current = guard_.getStream(device_);
      if (offload == reload || offload == current || reload == current) return "has no streams";
      offload_ = GenericStreams::instance().add(offload);
      reload_ = GenericStreams::instance().add(reload);
    } catch (const std::exception&) {
      return "has no streams";
    }
    try {
      const Point point = {offload_, GenericStreams::instance().at(offload_).record()};
      const c10::Stream waiting = GenericStreams::instance().at(reload_).torch_stream();
      GenericStreams::instance().at(offload_).with_event_of(point.serial, [&](const c10::Event& event) {
        event.block(waiting);
        event.synchronize();
        (void)event.query();
      });
    } catch (const std::exception&) {
      return "has no events";
    }
    return {};
  }

  bool finds_time() {
    try {
      const c10::Stream stream = GenericStreams::instance().at(offload_).torch_stream();
      const TimedPoint from = timed_.record(stream);
      const TimedPoint to = timed_.record(stream);
      generic_synchronize({offload_, GenericStreams::instance().at(offload_).record()});
      const bool tells = timed_.seconds_between(from, to).has_value();
      timed_.release(from);
      timed_.release(to);
      return tells;
    } catch (const std::exception&) {
      return false;
    }
  }

  // Only the device's own work is ever under way; every other point was reached before it was known.
  void wait_for_device(Point point) {
    if (point.is_beginning() || point.stream != host_) return;
    try {
      guard_.synchronizeDevice(device_.index());
    } catch (const c10::Error&) {  // nothing can be waited for on it: its operators have ended when they return
    }
  }

  void copy(void* target, c10::Device target_device, const void* source, c10::Device source_device, uint64_t nbytes,
            StreamId stream) {
    const BelowDispatch below;
    const at::Tensor to = bytes_at(target, nbytes, target_device);
    const at::Tensor from = bytes_at(source, nbytes, source_device);
    if (copies_at_once()) {
      const c10::DeviceGuard on_device(device_);
      to.copy_(from, /*non_blocking=*/false);
      wait_for_device({host_, 1});
    } else {
      const c10::StreamGuard on_stream(GenericStreams::instance().at(stream).torch_stream());
      to.copy_(from, /*non_blocking=*/true);
    }
  }

  Memory storage_of(c10::DataPtr data, uint64_t nbytes) const {
    return Memory::of_share(c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(),
                                                   c10::SymInt(static_cast<int64_t>(nbytes)), std::move(data),
                                                   allocator_, /*resizable=*/true, device_)
                                .release());
  }

  const c10::Device device_;
  const VirtualGuardImpl guard_;
  c10::Allocator* const allocator_;
  const c10::DeleterFnPtr deleter_;  // of the allocator's memory
  GenericTimedEvents timed_;
  const StreamId host_;  // stands for each stream of a device that copies at once
  StreamId offload_ = kNoStream;
  StreamId reload_ = kNoStream;
  std::string obstacle_;
  bool tells_time_ = false;
  std::atomic<uint64_t> points_at_once_{0};
  std::atomic<bool> is_aligned_{true};  // its allocations begin at multiples of kAlignmentBytes
};

std::map<c10::Device, GenericDevice*, bool (*)(const c10::Device&, const c10::Device&)>& devices() REQUIRES(gil) {
  static auto* const leaked =
      new std::map<c10::Device, GenericDevice*, bool (*)(const c10::Device&, const c10::Device&)>(
          [](const c10::Device& left, const c10::Device& right) {
            return std::pair(left.type(), left.index()) < std::pair(right.type(), right.index());
          });
  return *leaked;
}

// Between two questions whether a point was reached: short beside a copy, and long beside a question.
constexpr std::chrono::microseconds kPause{50};
constexpr int kMostPauses = 100;

// The memory that came from allocators of host memory, by address.
class LockedHostMemory {
 public:
  static LockedHostMemory& instance() {
    static auto* const leaked = new LockedHostMemory;
    return *leaked;
  }

  std::byte* allocate(c10::Allocator& allocator, size_t nbytes, std::string& refusal) {
    c10::DataPtr data;
    try {
      data = allocator.allocate(nbytes);
    } catch (const std::exception& error) {
      const auto* const from_torch = dynamic_cast<const c10::Error*>(&error);
      refusal = from_torch != nullptr ? from_torch->what_without_backtrace() : error.what();
      return nullptr;
    }
    auto* const address = static_cast<std::byte*>(data.get());
    if (address == nullptr || reinterpret_cast<uint64_t>(address) % kAlignmentBytes != 0) {
      refusal = "its memory does not begin at a multiple of " + std::to_string(kAlignmentBytes) + " bytes";
      return nullptr;
    }
    const MutexLock lock(mutex_);
    held_.emplace(address, std::move(data));
    return address;
  }

  void free(std::byte* address) {
    c10::DataPtr freed;  // outside of the lock
    const MutexLock lock(mutex_);
    freed = std::move(held_.at(address));
    held_.erase(address);
  }

 private:
  Mutex mutex_;
  std::map<std::byte*, c10::DataPtr> held_ GUARDED_BY(mutex_);
};

}  // namespace

bool is_generic_forced() {
  static const bool is_forced = [] {
    const char* const value = std::getenv("TORCHOFFLOAD_GENERIC_BACKEND");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return is_forced;
}

// MPS is left out: the data of its tensors are handles, and no addresses that a span could begin at.
bool is_generic(c10::DeviceType type) {
  if (type == c10::DeviceType::MPS || (type == c10::DeviceType::CUDA && !is_generic_forced())) return false;
  return c10::impl::hasDeviceGuardImpl(type) && at::accelerator::isAccelerator(type);
}

std::vector<c10::DeviceType> generic_types_here() {
  std::vector<c10::DeviceType> types;
  for (int number = 0; number < static_cast<int>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES); ++number) {
    const auto type = static_cast<c10::DeviceType>(number);
    if (!is_generic(type)) continue;
    try {
      if (at::globalContext().getAcceleratorHooksInterface(type).isAvailable()) types.push_back(type);
    } catch (const c10::Error&) {  // it has registered none, or not that one
      if (VirtualGuardImpl(type).deviceCount() > 0) types.push_back(type);
    }
  }
  return types;
}

Backend generic_backend(c10::Device device, SlotStore& store) {
  GenericDevice*& made = devices()[device];
  if (made == nullptr) made = new GenericDevice(device);
  return made->with(store);
}

void generic_synchronize(Point point) {
  GenericStream* const stream = GenericStreams::instance().find(point.stream);
  if (stream == nullptr || mutated(Mutant::GenericHostWaits)) return;
  stream->with_event_of(point.serial, [](const c10::Event& event) { event.synchronize(); });
}

bool generic_wait_in_background(Point point) {
  GenericStream* const stream = GenericStreams::instance().find(point.stream);
  bool is_reached = true;
  if (stream == nullptr || mutated(Mutant::GenericDiskWaits)) return is_reached;
  stream->with_event_of(point.serial, [&](const c10::Event& event) {
    for (int question = 0; question < kMostPauses; ++question) {
      is_reached = event.query();
      if (is_reached) return;
      std::this_thread::sleep_for(kPause);
    }
  });
  return is_reached;
}

HostRegistration generic_host_registration(c10::DeviceType type) {
  at::HostAllocator* allocator = nullptr;
  try {
    allocator = at::getHostAllocator(type);
  } catch (const c10::Error&) {  // some versions of PyTorch return null, and some raise
  }
  if (allocator == nullptr) return {};
  HostRegistration registration;
  registration.allocate = [allocator](size_t nbytes, std::string& refusal) {
    return LockedHostMemory::instance().allocate(*allocator, nbytes, refusal);
  };
  // The allocator would keep the memory for later requests, and the caller is giving it back to the system.
  registration.free = [allocator](std::byte* address) {
    LockedHostMemory::instance().free(address);
    allocator->empty_cache();
  };
  return registration;
}

std::vector<std::string> generic_notes() {
  std::vector<std::string> notes;
  for (const auto& [device, made] : devices()) {
    if (made->obstacle().empty()) continue;
    notes.push_back(device.str() + " " + made->obstacle() +
                    " that PyTorch knows, so copies are not made beside the computation");
  }
  return notes;
}

}  // namespace torchoffload
