#include "storage/io_queue.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "system/host_wait.h"
#include "system/mutex.h"

namespace torchoffload {
namespace {

constexpr size_t kStackBytes = size_t{1} << 20;  // the threads call read, write and little else

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
    : name_(std::move(name)), thread_count_(std::max(thread_count, 1U)), transfer_(std::move(transfer)) {
  running_.reserve(thread_count_);
  threads_.reserve(thread_count_);
}

IoQueue::~IoQueue() {
  if (fork_guard_.inherited()) return;
  std::vector<pthread_t> ending;
  {
    const MutexLock lock(mutex_);
    are_threads_ending_ = true;
    ending = threads_;
  }
  submitted_or_ending_.notify_all();
  for (const pthread_t thread : ending) pthread_join(thread, nullptr);
}

bool IoQueue::is_idle() const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return is_reached(submitted_);
}

void IoQueue::end_idle_threads() {
  if (fork_guard_.inherited()) return;
  std::vector<pthread_t> ending;
  {
    const MutexLock lock(mutex_);
    if (are_threads_ending_ || threads_.empty() || !is_reached(submitted_)) return;
    are_threads_ending_ = true;
    ending.swap(threads_);
  }
  submitted_or_ending_.notify_all();
  for (const pthread_t thread : ending) pthread_join(thread, nullptr);
  {
    const MutexLock lock(mutex_);
    are_threads_ending_ = false;
  }
  threads_ended_.notify_all();
}

uint64_t IoQueue::submit(const IoJob& job) {
  if (fork_guard_.inherited()) throw_inherited();
  uint64_t serial = 0;
  {
    const MutexLock lock(mutex_);
    while (are_threads_ending_) threads_ended_.wait(mutex_);
    if (threads_.empty()) start_threads();
    serial = add(job);
  }
  submitted_or_ending_.notify_one();
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

void IoQueue::start_threads() {
  int error = 0;
  while (threads_.size() < thread_count_ && error == 0) {
    pthread_t thread;
    error = start_thread(thread, name_.c_str(), thread_main, this, kStackBytes);
    if (error == 0) threads_.push_back(thread);
  }
  // One thread is enough to be right.
  if (threads_.empty()) throw StoreFull(std::string("cannot start an I/O thread: ") + std::strerror(error));
}

void* IoQueue::thread_main(void* queue) {
  static_cast<IoQueue*>(queue)->work();
  return nullptr;
}

void IoQueue::work() {
  const MutexLock lock(mutex_);
  while (true) {
    while (!are_threads_ending_ && waiting_.empty()) submitted_or_ending_.wait(mutex_);
    if (waiting_.empty()) return;
    take_and_run();
  }
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
    // This thread waits for what the job was told to run after, and for earlier jobs on the same bytes.
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
