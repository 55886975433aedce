#include "device/disk_backend.h"

#include <c10/core/CPUAllocator.h>

#include <stdexcept>
#include <utility>

#include "device/marked_memory.h"
#include "device/torch_memory.h"
#include "system/mutex.h"

namespace torchoffload {

DiskBackend::DiskBackend(std::string directory, DiskBackendOptions options)
    : store_(
          std::move(directory), [this](Point point) { synchronize(point); }, options.chunks),
      offload_queue_("offload-io", options.offload_thread_count, [this](const IoJob& job) { return transfer(job); }),
      reload_queue_("reload-io", options.reload_thread_count, [this](const IoJob& job) { return transfer(job); }) {}

DiskBackend::~DiskBackend() {
  if (fork_guard_.inherited()) return;
  // Jobs of either queue may wait for jobs of the other one, so both are emptied before either is destroyed.
  synchronize(record(offload_));
  synchronize(record(reload_));
}

bool DiskBackend::is_idle() const {
  return store_.used_bytes() == 0 && offload_queue_.is_idle() && reload_queue_.is_idle();
}

uint64_t DiskBackend::trim() {
  const uint64_t released_bytes = store_.trim();
  offload_queue_.end_idle_threads();
  reload_queue_.end_idle_threads();
  return released_bytes;
}

Point DiskBackend::record(StreamId stream) {
  if (stream != host_) return {stream, queue_of(stream).submitted()};
  const MutexLock lock(host_mutex_);
  return {host_, host_copy_count_};
}

void DiskBackend::wait(StreamId waiter, Point point) {
  if (waiter == host_) {
    synchronize(point);
  } else if (!point.is_beginning() && point.stream != host_) {
    queue_of(waiter).run_after(queue_of(point.stream), point.serial);
  }
}

Memory DiskBackend::allocate(uint64_t nbytes, uint64_t address_modulo) {
  const c10::Device device(c10::kCPU);
  if (nbytes == 0) return make_memory({nullptr, device}, 0);
  c10::DataPtr base = c10::GetCPUAllocator()->allocate(nbytes + kAlignmentBytes);
  const auto begin = reinterpret_cast<uintptr_t>(base.get());
  const uintptr_t shift = (address_modulo - begin) % kAlignmentBytes;
  auto* address = static_cast<std::byte*>(base.get()) + shift;
  const c10::DeleterFnPtr deleter = base.get_deleter();
  void* const context = base.release_context();  // the deleter frees it
  return make_memory({address, context, deleter, device}, nbytes);
}

void DiskBackend::copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) {
  auto* memory = static_cast<std::byte*>(const_cast<void*>(source));  // not written: the direction is Out
  copy({IoDirection::Out, slot, memory, nbytes}, stream);
}

void DiskBackend::copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) {
  copy({IoDirection::In, slot, static_cast<std::byte*>(target), nbytes}, stream);
}

MemoryOrigin DiskBackend::origin_of(MemoryRef memory) {
  return {mark_memory(storage_impl(memory), c10::GetCPUAllocator()->raw_deleter()), kNoStream};
}

void DiskBackend::synchronize(Point point) {
  if (!point.is_beginning() && point.stream != host_)
    queue_of(point.stream).wait_on_host(point.serial, "a transfer to or from " + store_.name());
}

PointStatus DiskBackend::status(Point point) {
  if (point.is_beginning() || point.stream == host_) return PointStatus::Reached;
  return queue_of(point.stream).is_reached(point.serial) ? PointStatus::Reached : PointStatus::Pending;
}

std::string DiskBackend::failure(Point point) {
  if (point.is_beginning()) return {};
  if (point.stream != host_) return queue_of(point.stream).failure(point.serial);
  const MutexLock lock(host_mutex_);
  auto found = host_failures_.find(point.serial);
  return found == host_failures_.end() ? std::string() : found->second;
}

void DiskBackend::forget(Point point) {
  if (point.is_beginning() || fork_guard_.inherited()) return;
  if (point.stream != host_) return queue_of(point.stream).forget(point.serial);
  const MutexLock lock(host_mutex_);
  host_failures_.erase(point.serial);
}

IoQueue& DiskBackend::queue_of(StreamId stream) {
  if (stream == offload_) return offload_queue_;
  if (stream == reload_) return reload_queue_;
  throw std::logic_error("DiskBackend: stream " + std::to_string(stream) + " is none of its own");
}

void DiskBackend::copy(const IoJob& job, StreamId stream) {
  if (stream != host_) {
    try {
      queue_of(stream).submit(job);
    } catch (const NoThread& none) {  // bytes that are wanted are read all the same
      if (job.direction == IoDirection::Out) throw StoreFull(none.what());
      queue_of(stream).run_here(job);
    }
    return;
  }
  std::string failure = transfer(job);
  const MutexLock lock(host_mutex_);
  ++host_copy_count_;
  if (!failure.empty()) host_failures_.emplace(host_copy_count_, std::move(failure));
}

std::string DiskBackend::transfer(const IoJob& job) {
  if (job.direction == IoDirection::Out) return store_.write(job.slot, job.memory, job.nbytes);
  return store_.read(job.memory, job.slot, job.nbytes);
}

}  // namespace torchoffload
