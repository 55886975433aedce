// The checked half of SimWorld: memory, operators, and the accesses that must be ordered.
#include <algorithm>
#include <atomic>

#include "testing/sim_world.h"

namespace torchoffload {

namespace {

uint64_t this_thread() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t number = next.fetch_add(1);
  return number;
}

Span span_of(const void* address, uint64_t nbytes) {
  const auto begin = reinterpret_cast<uint64_t>(address);
  return {begin, begin + nbytes};
}

bool overlap(const Span& left, const Span& right) { return left.begin < right.end && right.begin < left.end; }

}  // namespace

// Every call is a chance for queues to move (seeded mode), and to see that an operator has ended.
void SimWorld::begin_call() {
  if (!running_) return;
  commit_ended_operators();
  if (options_.mode == SimMode::Seeded) run_some();
}

// The call has been carried out, so later calls see a consistent world, whoever swallows the error.
void SimWorld::end_call() {
  if (races_thrown_ == races_.size()) return;
  const std::string text = races_[races_thrown_];
  races_thrown_ = races_.size();
  throw RaceError(text);
}

void SimWorld::report(std::string text) {
  constexpr size_t kEnough = 1000;  // a wrong program finds the same race again and again
  if (races_.size() < kEnough) races_.push_back(std::move(text));
}

std::string SimWorld::describe(const Access& access) const {
  return '"' + access_name(access.kind, access.owner) + "\" on " + streams_[access.stream].name;
}

void SimWorld::access(Stream& stream, AccessKind kind, MemoryOwner owner, const void* address, uint64_t nbytes) {
  if (!running_) return;
  stream.clock.join(host_clock_);
  const Access added{kind, owner, stream.index, stream.clock.advance(stream.index), this_thread()};
  if (const auto race = accesses_.add(span_of(address, nbytes), added, stream.clock)) {
    report("race: " + describe(race->earlier) + " is not ordered before " + describe(race->later));
  }
}

MemoryOwner SimWorld::require_block(Stream& stream, AccessKind kind, const void* address, uint64_t nbytes) {
  const SimBlock* block = heap_.find(address);
  const Span span = span_of(address, nbytes);
  if (running_ && nbytes > 0 && (block == nullptr || !block->span().contains(span))) {
    Access wild;
    wild.kind = kind;
    wild.stream = stream.index;
    report("race: " + describe(wild) + " touches memory that is not allocated");
  }
  return block ? block->owner : MemoryOwner::Source;
}

void SimWorld::saw_pack(const void* address, uint64_t nbytes, StreamId id, uint64_t sequence_number) {
  const MutexLock lock(mutex_);
  begin_call();
  const Stream& packing = used(id);
  if (running_) pending_.push_back({span_of(address, nbytes), packing.index, this_thread(), sequence_number});
  end_call();
}

void SimWorld::commit_ended_operators() {
  if (pending_.empty()) return;
  const uint64_t thread = this_thread();
  const uint64_t now = options_.sequence_number();
  std::erase_if(pending_, [&](const PendingWrite& write) REQUIRES(mutex_) {
    if (write.thread != thread || write.sequence_number == now) return false;
    access(streams_[write.stream], AccessKind::OperatorWrites, MemoryOwner::Source,
           reinterpret_cast<const void*>(write.span.begin), write.span.nbytes());
    return true;
  });
}

void SimWorld::end_operators() {
  const MutexLock lock(mutex_);
  const uint64_t thread = this_thread();
  std::erase_if(pending_, [&](const PendingWrite& write) REQUIRES(mutex_) {
    if (write.thread != thread) return false;
    access(streams_[write.stream], AccessKind::OperatorWrites, MemoryOwner::Source,
           reinterpret_cast<const void*>(write.span.begin), write.span.nbytes());
    return true;
  });
  end_call();
}

// On the packing thread a copy inside the operator is wrong. Another thread cannot know how far that operator is, and
// may copy a storage that both packed, if an earlier pack of it was written and waited for.
void SimWorld::check_no_open_operator(Stream& stream, const Span& span) {
  for (const PendingWrite& write : pending_) {
    if (!overlap(write.span, span)) continue;
    const Span both{std::max(write.span.begin, span.begin), std::min(write.span.end, span.end)};
    if (write.thread != this_thread() && accesses_.written_before(both, stream.clock)) continue;
    Access operator_write;
    operator_write.kind = AccessKind::OperatorWrites;
    operator_write.stream = write.stream;
    Access copy;
    copy.kind = AccessKind::CopyOutReads;
    copy.stream = stream.index;
    report("race: " + describe(operator_write) + " has not ended before " + describe(copy));
  }
}

void SimWorld::saw_unpack(const void* address, uint64_t nbytes, StreamId id) {
  const MutexLock lock(mutex_);
  begin_call();
  Stream& consuming = used(id);
  const MemoryOwner owner = require_block(consuming, AccessKind::UnpackReads, address, nbytes);
  access(consuming, AccessKind::UnpackReads, owner, address, nbytes);
  end_call();
}

void SimWorld::saw_operator(bool writes, const void* address, uint64_t nbytes, StreamId id) {
  const MutexLock lock(mutex_);
  begin_call();
  Stream& operating = used(id);
  run(operating, operating.run_count + operating.queue.size());
  const AccessKind kind = writes ? AccessKind::OperatorWrites : AccessKind::UnpackReads;
  const MemoryOwner owner = require_block(operating, kind, address, nbytes);
  operating.clock.join(host_clock_);
  const Access seen{kind, owner, operating.index, 0, this_thread()};
  const auto copy = running_ ? accesses_.find_open_copy(span_of(address, nbytes), operating.clock) : std::nullopt;
  if (copy) report("race: " + describe(*copy) + " is not ordered before " + describe(seen));
  end_call();
}

void SimWorld::saw_transfer(bool is_out, const void* address, uint64_t nbytes) {
  const MutexLock lock(mutex_);
  begin_call();
  if (running_) {
    Stream& host = streams_[*disk_threads_];
    access(host, is_out ? AccessKind::SpillReads : AccessKind::FetchWrites, MemoryOwner::Slot, address, nbytes);
    host_clock_.join(host.clock);  // commands that the host enqueues from now on come after it
  }
  end_call();
}

void SimWorld::fill(const void* address, uint64_t nbytes, StreamId id) {
  const MutexLock lock(mutex_);
  begin_call();
  access(stream(id), AccessKind::Fill, MemoryOwner::Source, address, nbytes);
  end_call();
}

void SimWorld::set_tells_origins(bool tells) {
  const MutexLock lock(mutex_);
  tells_origins_ = tells;
}

std::pair<uint64_t, StreamId> SimWorld::origin_of(const void* address) {
  const MutexLock lock(mutex_);
  const SimBlock* const block = tells_origins_ ? heap_.find(address) : nullptr;
  return block == nullptr ? std::pair(uint64_t{0}, kNoStream) : std::pair(block->number, block->stream);
}

void SimWorld::note_use(const void* address, StreamId id) {
  const MutexLock lock(mutex_);
  begin_call();
  SimBlock* block = heap_.find(address);
  const bool known = block && (block->stream == id || std::count(block->users.begin(), block->users.end(), id));
  if (block && !known) block->users.push_back(used(id).id);
  end_call();
}

size_t SimWorld::user_count(const void* address) {
  const MutexLock lock(mutex_);
  const SimBlock* const block = heap_.find(address);
  return block == nullptr ? 0 : block->users.size();
}

void* SimWorld::allocate(uint64_t nbytes, int device, MemoryOwner owner) {
  const StreamId id = current_stream(device);
  const MutexLock lock(mutex_);
  begin_call();
  const SimBlock& block = heap_.allocate(nbytes, device, id, owner, running_ ? simulation_ : 0);
  accesses_.forget(block.span());  // host memory that was not registered may have been there before
  access(stream(id), AccessKind::MemoryAllocated, owner, block.address, block.nbytes);
  return block.address;
}

void SimWorld::free(void* address) noexcept {
  const MutexLock lock(mutex_);
  SimBlock* block = heap_.find(address);
  if (block == nullptr) return;
  if (!running_ || block->simulation != simulation_) return heap_.free_to_system(*block);
  begin_call();
  std::erase_if(pending_,
                [&](const PendingWrite& write) REQUIRES(mutex_) { return overlap(write.span, block->span()); });

  // The pool hands the memory out after the commands of the allocating stream so far, and after the streams it was told
  // of.
  Stream& allocating = stream(block->stream);
  VectorClock clock = allocating.clock;
  clock.join(host_clock_);
  // The commands that are queued on the stream itself would run before the memory's next user.
  SimHeap::Reuse reuse = allocating.queue.empty() ? SimHeap::Reuse::AtOnce : SimHeap::Reuse::Never;
  for (const StreamId user : block->users) {
    clock.join(used(user).clock);
    // A real pool would hold the block back until the queue has run; here nothing waits for that.
    if (!stream(user).queue.empty()) reuse = SimHeap::Reuse::Never;
  }
  if (const auto earlier = accesses_.find_unordered(block->span(), clock)) {
    Access freed;
    freed.kind = AccessKind::MemoryFreed;
    freed.owner = block->owner;
    freed.stream = allocating.index;
    report("race: " + describe(*earlier) + " is not ordered before " + describe(freed));
  }
  accesses_.forget(block->span());
  heap_.free(*block, reuse);
}

std::optional<int> SimWorld::device_index_of(const void* address) {
  const MutexLock lock(mutex_);
  const SimBlock* block = running_ ? heap_.find(address) : nullptr;
  if (block == nullptr || block->simulation != simulation_) return std::nullopt;
  return block->device;
}

void SimWorld::register_host_memory(void* address, uint64_t nbytes) {
  const MutexLock lock(mutex_);
  host_memory_[address] = nbytes;
}

bool SimWorld::unregister_host_memory(void* address) {
  const MutexLock lock(mutex_);
  const auto found = host_memory_.find(address);
  if (found == host_memory_.end()) return false;
  const Span span = span_of(address, found->second);
  if (const auto earlier = accesses_.find_unordered(span, host_clock_)) {
    report("race: " + describe(*earlier) + " is not ordered before \"slot memory is released\" on the host");
  }
  run_all();  // queued copies may still reach for it
  accesses_.forget(span);
  host_memory_.erase(found);
  return true;
}

std::vector<std::string> SimWorld::races() const {
  const MutexLock lock(mutex_);
  return races_;
}

void SimWorld::clear_races() {
  const MutexLock lock(mutex_);
  races_.clear();
  races_thrown_ = 0;
}

uint64_t SimWorld::allocated_bytes(int device) const {
  const MutexLock lock(mutex_);
  return heap_.allocated_bytes(device);
}

uint64_t SimWorld::peak_bytes(int device) const {
  const MutexLock lock(mutex_);
  return heap_.peak_bytes(device);
}

uint64_t SimWorld::take_peak_bytes(int device) {
  const MutexLock lock(mutex_);
  return heap_.take_peak_bytes(device);
}

uint64_t SimWorld::access_count() const {
  const MutexLock lock(mutex_);
  return accesses_.access_count();
}

}  // namespace torchoffload
