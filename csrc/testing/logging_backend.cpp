#include "testing/logging_backend.h"

#include <utility>

#include "device/backends.h"

namespace torchoffload {

namespace {

SeamLog& seam_log() { return SeamLog::instance(); }

// Never destroyed: the function may hold a Python object.
std::function<void(const std::string&)>& seam_hook() {
  static auto* const hook = new std::function<void(const std::string&)>;
  return *hook;
}

void call_hook(const char* call) {
  if (seam_hook()) seam_hook()(call);
}

// Never destroyed: the function may hold a Python object.
std::function<void()>& allocation_hook() {
  static auto* const hook = new std::function<void()>;
  return *hook;
}

const RegisterBackendWrapper log_is_registered(&logged);

}  // namespace

std::shared_ptr<const Backend> logged(const Backend& backend, int device_index) {
  struct Logged {
    Logged(const Backend& inner, int index) : logging(inner, index), parts(logging.parts()) {}
    LoggingBackend logging;
    const Backend parts;
  };
  const auto made = std::make_shared<Logged>(backend, device_index);
  return {made, &made->parts};
}

void set_seam_hook(std::function<void(const std::string&)> hook) { seam_hook() = std::move(hook); }

void set_allocation_hook(std::function<void()> hook) { allocation_hook() = std::move(hook); }

SeamLog& SeamLog::instance() {
  static SeamLog* const log = new SeamLog;
  return *log;
}

void SeamLog::start() {
  const MutexLock lock(mutex_);
  lines_.clear();
  compute_names_.clear();
  compute_counts_.clear();
  serials_before_.clear();
  on_ = true;
}

void SeamLog::stop() {
  const MutexLock lock(mutex_);
  on_ = false;
}

bool SeamLog::is_on() const {
  const MutexLock lock(mutex_);
  return on_;
}

std::vector<std::string> SeamLog::lines() const {
  const MutexLock lock(mutex_);
  return lines_;
}

void SeamLog::write(const std::string& line) {
  const MutexLock lock(mutex_);
  if (on_) lines_.push_back(line);
}

void SeamLog::meet_own_stream(StreamId stream, const std::string& name) {
  const MutexLock lock(mutex_);
  own_names_.emplace(stream, name);
}

void SeamLog::meet_point(Point point) {
  const MutexLock lock(mutex_);
  if (on_) serials_before_.emplace(point.stream, point.serial - 1);
}

std::string SeamLog::name_of(StreamId stream, int device_index) {
  const MutexLock lock(mutex_);
  if (const auto own = own_names_.find(stream); own != own_names_.end()) return own->second;
  std::string& name = compute_names_[stream];
  if (name.empty()) {
    const int count = ++compute_counts_[device_index];
    name = "compute_stream[" + std::to_string(device_index) + "]" + (count > 1 ? "#" + std::to_string(count) : "");
  }
  return name;
}

std::string SeamLog::name_of(Point point, int device_index) {
  const std::string stream = name_of(point.stream, device_index);
  if (point.is_beginning()) return stream + "@beginning";
  const MutexLock lock(mutex_);
  const auto before = serials_before_.find(point.stream);
  if (before == serials_before_.end() || point.serial <= before->second) return stream + "@before";
  return stream + "@" + std::to_string(point.serial - before->second);
}

void LoggingBackend::write(const char* call, StreamId stream, uint64_t nbytes) const {
  seam_log().write(std::string(call) + " " + name(stream) + " " + std::to_string(nbytes));
}

StreamId LoggingBackend::current_stream() {
  const StreamId stream = inner_.streams.current_stream();
  if (seam_log().is_on()) name(stream);  // named by the device that it is current on
  return stream;
}

StreamId LoggingBackend::offload_stream() {
  const StreamId stream = inner_.streams.offload_stream();
  seam_log().meet_own_stream(stream, "offload_stream[" + std::to_string(device_index_) + "]");
  return stream;
}

StreamId LoggingBackend::reload_stream() {
  const StreamId stream = inner_.streams.reload_stream();
  seam_log().meet_own_stream(stream, "reload_stream[" + std::to_string(device_index_) + "]");
  return stream;
}

Point LoggingBackend::record(StreamId stream) {
  call_hook("record");
  const Point point = inner_.streams.record(stream);
  if (seam_log().is_on()) {
    seam_log().meet_point(point);
    seam_log().write("record " + name(point));
  }
  return point;
}

TimedPoint LoggingBackend::record_timed(StreamId stream) {
  call_hook("record_timed");
  if (seam_log().is_on()) seam_log().write("record_timed " + name(stream));
  return inner_.streams.record_timed(stream);
}

void LoggingBackend::wait(StreamId waiter, Point point) {
  call_hook("wait");
  if (seam_log().is_on()) seam_log().write("wait " + name(waiter) + " <- " + name(point));
  inner_.streams.wait(waiter, point);
}

Memory LoggingBackend::allocate(uint64_t nbytes, uint64_t address_modulo) {
  call_hook("allocate");
  if (seam_log().is_on()) write("allocate", inner_.streams.current_stream(), nbytes);
  if (const auto hook = allocation_hook()) hook();
  return inner_.memory.allocate(nbytes, address_modulo);
}

void LoggingBackend::copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) {
  call_hook("copy_out");
  if (seam_log().is_on()) write("copy_out", stream, nbytes);
  inner_.link.copy_out(slot, source, nbytes, stream);
}

void LoggingBackend::copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) {
  call_hook("copy_in");
  if (seam_log().is_on()) write("copy_in", stream, nbytes);
  inner_.link.copy_in(target, slot, nbytes, stream);
}

void LoggingBackend::note_use(MemoryRef memory, StreamId stream) {
  call_hook("note_use");
  if (seam_log().is_on()) seam_log().write("note_use " + name(stream));
  inner_.memory.note_use(memory, stream);
}

void LoggingBackend::synchronize(Point point) {
  if (seam_log().is_on()) seam_log().write("synchronize " + name(point));
  inner_.streams.synchronize(point);
}

PointStatus LoggingBackend::status(Point point) {
  if (seam_log().is_on()) seam_log().write("status " + name(point));
  return inner_.streams.status(point);
}

void LoggingBackend::saw_pack(const void* address, uint64_t nbytes, StreamId stream, uint64_t sequence_number) {
  inner_.observer.saw_pack(address, nbytes, stream, sequence_number);
}

void LoggingBackend::saw_unpack(const void* address, uint64_t nbytes, StreamId stream) {
  inner_.observer.saw_unpack(address, nbytes, stream);
}

}  // namespace torchoffload
