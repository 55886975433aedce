// LoggingBackend: writes down the calls of any backend, in words that are the same on every device.
// Ownership:     refers to the parts of the backend that it wraps; the log is the process's.
// Thread safety: every method, any thread; one leaf mutex.
// Stream order:  adds none.
// Shutdown:      never destroyed; see Note [No CUDA after main].
//
// It is part of the test build only.
//
// Before each call that enqueues, allocates or notes a use it calls the hook that a test set. The hook may throw, as a
// device that fails would, or let another thread in.
//
// A stream is named by its role, "offload_stream[0]"; compute_streams are told apart in the order in which the log
// meets them, "compute_stream[0]", "compute_stream[0]#2". A point is named by its place among those recorded since the
// log was cleared, "compute_stream[0]@1", or "@before" that. Lines:
//   record compute_stream[0]@1                     wait offload_stream[0] <- compute_stream[0]@1
//   copy_out offload_stream[0] 4096                copy_in reload_stream[0] 4096
//   allocate compute_stream[0] 4096                note_use compute_stream[0]#2
//   synchronize offload_stream[0]@7                status offload_stream[0]@7
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.h"
#include "system/mutex.h"

namespace torchoffload {

class SeamLog {
 public:
  static SeamLog& instance();

  void start();  // clears it
  void stop();
  bool is_on() const;
  std::vector<std::string> lines() const;

  void write(const std::string& line);  // dropped while the log is off

  // The facts by which the log names a stream. Any stream that is neither offload_stream nor reload_stream is a
  // compute_stream.
  void meet_own_stream(StreamId stream, const std::string& name);
  void meet_point(Point point);
  std::string name_of(StreamId stream, int device_index);
  std::string name_of(Point point, int device_index);

 private:
  SeamLog() = default;

  mutable Mutex mutex_;
  bool on_ GUARDED_BY(mutex_) = false;
  std::vector<std::string> lines_ GUARDED_BY(mutex_);
  std::map<StreamId, std::string> own_names_ GUARDED_BY(mutex_);      // of offload_stream and reload_stream, for ever
  std::map<StreamId, std::string> compute_names_ GUARDED_BY(mutex_);  // since start()
  std::map<int, int> compute_counts_ GUARDED_BY(mutex_);              // by device
  std::map<StreamId, uint64_t> serials_before_ GUARDED_BY(mutex_);    // since start()
};

// `hook` is given the name of the call. Null: none. Set it while no other thread is at the seam.
void set_seam_hook(std::function<void(const std::string& call)> hook);

// Runs before each allocation of a reload buffer, as an allocator that is written in Python would; null for none.
void set_allocation_hook(std::function<void()> hook);

class LoggingBackend final : public DeviceMemory, public Streams, public Link, public Observer {
 public:
  LoggingBackend(const Backend& inner, int device_index) : inner_(inner), device_index_(device_index) {}

  // The wrapped backend's store, with parts that log.
  Backend parts() {
    return {.device = inner_.device,
            .memory = *this,
            .streams = *this,
            .link = *this,
            .store = inner_.store,
            .observer = *this};
  }

  StreamId current_stream() override;
  StreamId offload_stream() override;
  StreamId reload_stream() override;
  Point record(StreamId stream) override;
  void wait(StreamId waiter, Point point) override;
  Memory allocate(uint64_t nbytes, uint64_t address_modulo) override;
  void copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) override;
  void copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) override;
  bool owns(MemoryRef memory) const override { return inner_.memory.owns(memory); }
  void note_use(MemoryRef memory, StreamId stream) override;
  MemoryOrigin origin_of(MemoryRef memory) override { return inner_.memory.origin_of(memory); }
  uint64_t allocation_of(MemoryRef memory) override { return inner_.memory.allocation_of(memory); }
  bool must_settle() override { return inner_.memory.must_settle(); }
  void settle() override { inner_.memory.settle(); }
  bool is_capturing_on(StreamId stream) override { return inner_.streams.is_capturing_on(stream); }
  void synchronize(Point point) override;
  PointStatus status(Point point) override;
  std::string failure(Point point) override { return inner_.link.failure(point); }
  void forget(Point point) override { inner_.link.forget(point); }
  bool copies_at_once() const override { return inner_.streams.copies_at_once(); }
  bool is_lasting(StreamId stream) override { return inner_.streams.is_lasting(stream); }
  bool is_graph_memory(const void* address) override { return inner_.memory.is_graph_memory(address); }
  bool is_capturing() override { return inner_.streams.is_capturing(); }
  bool tells_time() const override { return inner_.streams.tells_time(); }
  TimedPoint record_timed(StreamId stream) override;
  std::optional<double> seconds_between(TimedPoint from, TimedPoint to) override {
    return inner_.streams.seconds_between(from, to);
  }
  void release(TimedPoint point) override { inner_.streams.release(point); }
  uint64_t allocated_bytes() override { return inner_.memory.allocated_bytes(); }
  Completion completion(StreamId stream) const override { return inner_.streams.completion(stream); }
  bool may_block(StreamId stream) const override { return inner_.streams.may_block(stream); }
  void saw_pack(const void* address, uint64_t nbytes, StreamId stream, uint64_t sequence_number) override;
  void saw_unpack(const void* address, uint64_t nbytes, StreamId stream) override;
  void saw_operators_end() override { inner_.observer.saw_operators_end(); }
  void saw_growth() override { SeamLog::instance().write("grow"); }

 private:
  template <typename Place>
  std::string name(Place place) const {
    return SeamLog::instance().name_of(place, device_index_);
  }
  void write(const char* call, StreamId stream, uint64_t nbytes) const;

  const Backend inner_;
  const int device_index_;
};

// The same backend with parts that log, which live as long as it.
std::shared_ptr<const Backend> logged(const Backend& backend, int device_index);

}  // namespace torchoffload
