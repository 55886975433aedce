#include "storage/io_queue.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "system/host_wait.h"
#include "system/mutex.h"

namespace torchoffload {
namespace {

bool slots_overlap(const IoJob& a, const IoJob& b) {
  const Range& left = a.slot.range;
  const Range& right = b.slot.range;
  return left.block == right.block && left.offset < right.offset + right.nbytes &&
         right.offset < left.offset + left.nbytes;
}

bool memory_overlaps(const IoJob& a, const IoJob& b) {
  const auto left = reinterpret_cast<uintptr_t>(a.memory);
  const auto right = reinterpret_cast<uintptr_t>(b.memory);
  return left < right + b.nbytes && right < left + a.nbytes;
}

// May the two not swap?
bool conflict(const IoJob& a, const IoJob& b) {
  const bool writes_a_slot = a.direction == IoDirection::Out || b.direction == IoDirection::Out;
  const bool writes_memory = a.direction == IoDirection::In || b.direction == IoDirection::In;
  return (writes_a_slot && slots_overlap(a, b)) || (writes_memory && memory_overlaps(a, b));
}

[[noreturn]] void throw_inherited() {
  throw std::runtime_error(
      "this process was forked after offloading to disk had begun: its I/O threads, and what they had not finished, "
      "stayed with the parent. Use a fresh process (multiprocessing's 'spawn'), or fork earlier");
}

}  // namespace

IoQueue::IoQueue(std::string name, unsigned thread_count, Transfer transfer)
    : transfer_(std::move(transfer)), pool_(std::move(name), thread_count, [this] { run_waiting(); }) {
  running_.reserve(thread_count);
}

bool IoQueue::is_idle() const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return is_reached(submitted_);
}

uint64_t IoQueue::submit(const IoJob& job) {
  if (fork_guard_.inherited()) throw_inherited();
  pool_.reserve();
  uint64_t serial = 0;
  try {
    const MutexLock lock(mutex_);
    serial = add(job);
  } catch (const std::exception&) {
    pool_.submit();  // a call that finds nothing to do
    throw;
  }
  pool_.submit();
  return serial;
}

uint64_t IoQueue::run_here(const IoJob& job) {
  if (fork_guard_.inherited()) throw_inherited();
  const MutexLock lock(mutex_);
  const uint64_t serial = add(job);
  while (taken_ < serial) take_and_run();
  return serial;
}

uint64_t IoQueue::add(const IoJob& job) {
  auto is_reached_floor = [](const Floor& floor) { return floor.queue->is_reached(floor.serial); };
  std::erase_if(floors_, is_reached_floor);
  waiting_.push_back({submitted_ + 1, job, floors_});
  return ++submitted_;
}

void IoQueue::run_after(const IoQueue& other, uint64_t serial) {
  if (other.is_reached(serial)) return;
  if (fork_guard_.inherited()) throw_inherited();
  // The argument of Note [I/O streams] needs it.
  if (serial > other.submitted()) throw std::logic_error("IoQueue: told to run after a job that was not submitted");
  const MutexLock lock(mutex_);
  auto same_queue = [&](const Floor& floor) { return floor.queue == &other; };
  auto known = std::find_if(floors_.begin(), floors_.end(), same_queue);
  if (known == floors_.end()) {
    floors_.push_back({&other, serial});
  } else {
    known->serial = std::max(known->serial, serial);
  }
}

uint64_t IoQueue::submitted() const {
  if (fork_guard_.inherited()) throw_inherited();
  const MutexLock lock(mutex_);
  return submitted_;
}

void IoQueue::wait_for(uint64_t serial) const {
  if (is_reached(serial)) return;
  if (fork_guard_.inherited()) throw_inherited();
  const MutexLock lock(mutex_);
  if (serial > submitted_) throw std::logic_error("IoQueue: a wait for a job that was not submitted");
  while (!is_reached(serial)) completed_moved_.wait(mutex_);
}

void IoQueue::wait_on_host(uint64_t serial, const std::string& what) const {
  if (is_reached(serial)) return;
  if (fork_guard_.inherited()) throw_inherited();
  const MutexLock lock(mutex_);
  if (serial > submitted_) throw std::logic_error("IoQueue: a wait for a job that was not submitted");
  HostWait::until(mutex_, completed_moved_, [&] { return is_reached(serial); }, [&] { return what; });
}

std::string IoQueue::failure(uint64_t serial) const {
  if (fork_guard_.inherited()) throw_inherited();
  const MutexLock lock(mutex_);
  auto found = failures_.find(serial);
  return found == failures_.end() ? std::string() : found->second;
}

void IoQueue::forget(uint64_t serial) {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  if (failures_.erase(serial) == 0 && !is_reached(serial)) forgotten_.insert(serial);
}

void IoQueue::run_waiting() {
  const MutexLock lock(mutex_);
  while (!waiting_.empty()) take_and_run();
}

void IoQueue::take_and_run() {
  Submitted next = std::move(waiting_.front());
  waiting_.pop_front();
  taken_ = next.serial;
  uint64_t last_conflict = 0;
  for (const Submitted& earlier : running_) {
    if (conflict(earlier.job, next.job)) last_conflict = std::max(last_conflict, earlier.serial);
  }
  if (last_conflict > 0) next.floors.push_back({this, last_conflict});
  running_.push_back(next);
  std::string failure;
  {
    const MutexUnlock unlocked(mutex_);
    failure = run(next);
  }
  finish(next.serial, std::move(failure));
}

std::string IoQueue::run(const Submitted& submitted) const {
  try {
    // This thread waits for the job's floors, and for earlier jobs on the same bytes.
    for (const Floor& floor : submitted.floors) floor.queue->wait_for(floor.serial);
    return transfer_(submitted.job);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void IoQueue::finish(uint64_t serial, std::string failure) {
  if (!failure.empty() && !forgotten_.contains(serial)) failures_.emplace(serial, std::move(failure));
  std::erase_if(running_, [&](const Submitted& running) { return running.serial == serial; });
  uint64_t completed = taken_;
  for (const Submitted& running : running_) completed = std::min(completed, running.serial - 1);
  if (completed == completed_.load(std::memory_order_relaxed)) return;
  forgotten_.erase(forgotten_.begin(), forgotten_.upper_bound(completed));
  completed_.store(completed, std::memory_order_release);
  completed_moved_.notify_all();
}

}  // namespace torchoffload
