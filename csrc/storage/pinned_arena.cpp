#include "storage/pinned_arena.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/mutant.h"
#include "system/host_memory.h"
#include "system/host_wait.h"
#include "system/mutex.h"

namespace torchoffload {
namespace {

constexpr char kPinnedInherited[] = "pinned memory was inherited by a forked process, which cannot use it";
constexpr char kStopped[] = "the process is about to end, and no host memory is pinned any more";

}  // namespace

// While a Turn lives, no other thread adds or removes chunks. It is made and ended without the lock.
class PinnedArena::Turn {
 public:
  explicit Turn(PinnedArena& arena) : Turn(arena, [] { return false; }) {}

  // `is_done` is asked with the lock held: another thread's turn may have made this one unnecessary. The analysis does
  // not know that its lock is this arena's.
  template <typename IsDone>
  Turn(PinnedArena& arena, IsDone is_done) NO_THREAD_SAFETY_ANALYSIS : arena_(arena) {
    const MutexLock lock(arena.mutex_);
    ++arena.waiting_count_;
    while (!is_done() && arena.is_turn_taken_) arena.changed_.wait(arena.mutex_);
    --arena.waiting_count_;
    is_mine_ = !is_done();
    if (is_mine_) arena.is_turn_taken_ = true;
    if (!is_mine_) arena.changed_.notify_all();  // wakes the arena's thread, which lets waiting threads go first
  }

  ~Turn() {
    if (!is_mine_) return;
    const MutexLock lock(arena_.mutex_);
    arena_.is_turn_taken_ = false;
    arena_.changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool is_mine() const { return is_mine_; }

 private:
  PinnedArena& arena_;
  bool is_mine_ = false;
};

PinnedArena::PinnedArena(HostRegistration registration, std::function<void(Point)> synchronize, ChunkPolicy policy,
                         uint64_t page_bytes)
    : registration_(std::move(registration)),
      synchronize_(std::move(synchronize)),
      page_bytes_(page_bytes),
      plan_(policy, page_bytes) {}

PinnedArena::~PinnedArena() {
  if (fork_guard_.inherited()) return;
  stop();
  if (thread_) pthread_join(*thread_, nullptr);
  if (registration_.locks()) return;
  for (const auto& [id, chunk] : chunks_) free_chunk(chunk, registration_);
}

// ---- slots ----

std::optional<Slot> PinnedArena::try_acquire(uint64_t nbytes, std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return std::nullopt;
  const MutexLock lock(mutex_);
  const std::optional<Range> range = ranges_.try_acquire(nbytes, guards);
  if (!range) return std::nullopt;
  peak_bytes_ = std::max(peak_bytes_, ranges_.used_bytes());
  plan_.saw_slot(range->nbytes, ranges_.capacity_bytes(), ranges_.largest_free_bytes());
  wake_if_wanted();
  return Slot{*range, chunks_.at(range->block).address + range->offset};
}

void PinnedArena::release(const Slot& slot, const std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  ranges_.release(slot.range, guards);
}

uint64_t PinnedArena::capacity_bytes() const {
  if (fork_guard_.inherited()) return 0;
  const MutexLock lock(mutex_);
  return ranges_.capacity_bytes();
}

uint64_t PinnedArena::used_bytes() const {
  if (fork_guard_.inherited()) return 0;
  const MutexLock lock(mutex_);
  return ranges_.used_bytes();
}

bool PinnedArena::can_acquire(uint64_t nbytes) const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return can_acquire_locked(nbytes);
}

uint64_t PinnedArena::take_peak_bytes() {
  if (fork_guard_.inherited()) return 0;
  const MutexLock lock(mutex_);
  return std::exchange(peak_bytes_, ranges_.used_bytes());
}

void PinnedArena::check_invariants() const {
  const MutexLock lock(mutex_);
  ranges_.check_invariants();
}

// ---- growing ----

void PinnedArena::grow(uint64_t nbytes) {
  if (fork_guard_.inherited()) throw StoreFull(kPinnedInherited);
  // A system that overcommits memory would grant this request, and kill the process when the pages are touched.
  if (nbytes > read_host_memory().total_bytes.value_or(UINT64_MAX))
    throw StoreFull("a slot of " + std::to_string(nbytes) + " bytes is more than this machine's memory");
  const Turn turn(*this, [&]() REQUIRES(mutex_) { return can_acquire_locked(nbytes); });
  if (!turn.is_mine()) return;  // another thread has made room meanwhile
  uint64_t request_bytes = 0;
  uint64_t least_bytes = 0;
  uint64_t unlocked_bytes = 0;
  {
    const MutexLock lock(mutex_);
    if (is_stopped_) throw StoreFull(kStopped);
    request_bytes = plan_.bytes_on_need(nbytes, ranges_.capacity_bytes());
    least_bytes = plan_.least_bytes(nbytes);
    unlocked_bytes = plan_.bytes_unlocked(nbytes, ranges_.capacity_bytes());
  }
  try {
    try {
      take_chunk(request_bytes);
    } catch (const StoreFull&) {
      if (least_bytes == request_bytes) throw;
      take_chunk(least_bytes);
    }
  } catch (const LockRefused& refused) {
    take_unlocked_chunk(unlocked_bytes, refused.what());
  }
}

void PinnedArena::add_chunk(const PinnedChunk& chunk) {
  grow_count_.fetch_add(1, std::memory_order_relaxed);
  const MutexLock lock(mutex_);
  chunks_.emplace(ranges_.add_block(chunk.nbytes), chunk);
  if (chunk.is_locked || !registration_.locks()) plan_.saw_chunk(chunk.nbytes);
}

void PinnedArena::take_chunk(uint64_t nbytes) {
  try {
    add_chunk(take_pinned_chunk(nbytes, page_bytes_, registration_));
  } catch (...) {
    const MutexLock lock(mutex_);
    plan_.saw_refusal(nbytes);
    throw;
  }
}

// ---- memory that is not locked ----

void PinnedArena::take_unlocked_chunk(uint64_t nbytes, const char* refusal) {
  {
    const MutexLock lock(mutex_);
    if (refuses_plain_) throw StoreFull(refusal);
  }
  add_chunk(take_plain_chunk(nbytes, page_bytes_, registration_));
  const MutexLock lock(mutex_);
  if (std::exchange(has_told_trouble_, true)) return;
  trouble_ =
      std::string(refusal) +
      ". Saved tensors go to host memory that is not page-locked: copies to it are several times slower, and the "
      "program waits for them. Allow more locked memory (ulimit -l, or the container's limit) to avoid that";
}

void PinnedArena::refuse_plain_memory(bool refuses) {
  const MutexLock lock(mutex_);
  refuses_plain_ = refuses;
  has_told_trouble_ = false;
}

std::string PinnedArena::take_trouble() {
  if (fork_guard_.inherited()) return {};
  const MutexLock lock(mutex_);
  return std::exchange(trouble_, {});
}

bool PinnedArena::can_acquire_locked(uint64_t nbytes) const {
  return ranges_.capacity_bytes() > 0 && ranges_.largest_free_bytes() >= std::max<uint64_t>(nbytes, 1);
}

// ---- growing ahead ----

void PinnedArena::grow_ahead(uint64_t limit_bytes) {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  plan_.grow_ahead(limit_bytes);
}

void PinnedArena::reserve(uint64_t capacity_bytes) {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  plan_.reserve(capacity_bytes);
  wake_if_wanted();
}

void PinnedArena::grow_on_need() {
  if (fork_guard_.inherited()) return;
  {
    const MutexLock lock(mutex_);
    plan_.grow_on_need();
  }
  const Turn after_the_chunk_in_the_making(*this);
}

void PinnedArena::stop() {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  is_stopped_ = true;
  changed_.notify_all();
  ExitWait::until(
      mutex_, changed_, [&]() REQUIRES(mutex_) { return !is_turn_taken_; }, "host memory that is being page-locked");
}

bool PinnedArena::is_growing() const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return is_turn_taken_ || may_grow_ahead();
}

bool PinnedArena::may_grow_ahead() const { return !is_stopped_ && plan_.bytes_ahead(ranges_.capacity_bytes()) > 0; }

void PinnedArena::wake_if_wanted() {
  if (!may_grow_ahead()) return;
  if (thread_) return changed_.notify_all();
  pthread_t thread;
  if (start_thread(thread, "arena-growth", thread_main, this) != 0) return;  // without it the arena grows on need
  thread_ = thread;
}

void* PinnedArena::thread_main(void* arena) {
  static_cast<PinnedArena*>(arena)->work();
  return nullptr;
}

void PinnedArena::work() {
  const MutexLock lock(mutex_);
  while (true) {
    while (!is_stopped_ && !(!is_turn_taken_ && waiting_count_ == 0 && may_grow_ahead())) changed_.wait(mutex_);
    if (is_stopped_) return;
    const uint64_t nbytes = plan_.bytes_ahead(ranges_.capacity_bytes());
    is_turn_taken_ = true;
    try {
      const MutexUnlock unlocked(mutex_);
      take_chunk(nbytes);
    } catch (const std::exception&) {
      // The plan remembers the refusal; see Note [Growing ahead].
    }
    is_turn_taken_ = false;
    changed_.notify_all();
  }
}

// ---- releasing ----

uint64_t PinnedArena::trim() {
  if (fork_guard_.inherited()) return 0;
  const Turn turn(*this);
  if (is_stopped()) return 0;
  return release_chunks(take_idle_chunks());
}

// It would not be enough to remove some of the chunks: a step's slots fit into the others only with gaps at the chunks'
// ends, and the next step would grow again. In a single chunk the slots lie side by side, without gaps. So all idle
// chunks are released, and the missing bytes are taken again as one chunk.
uint64_t PinnedArena::shrink(uint64_t needed_bytes) {
  if (fork_guard_.inherited()) return 0;
  const Turn turn(*this);
  if (is_stopped() || !should_shrink(needed_bytes)) return 0;
  const uint64_t released_bytes = release_chunks(take_idle_chunks());
  const uint64_t kept_bytes = capacity_bytes();
  const uint64_t missing_bytes = round_up(needed_bytes - std::min(kept_bytes, needed_bytes), page_bytes_);
  try {
    if (missing_bytes > 0) take_chunk(missing_bytes);
  } catch (const StoreFull&) {
    // The next step grows chunk by chunk, and says so if that is refused.
  }
  const MutexLock lock(mutex_);
  plan_.saw_shrink(needed_bytes, ranges_.capacity_bytes());
  return released_bytes - std::min(released_bytes, missing_bytes);
}

bool PinnedArena::should_shrink(uint64_t needed_bytes) const {
  const MutexLock lock(mutex_);
  return plan_.should_shrink(needed_bytes, ranges_.capacity_bytes()) && !ranges_.idle_blocks().empty();
}

bool PinnedArena::is_stopped() const {
  const MutexLock lock(mutex_);
  return is_stopped_;
}

PinnedArena::Idle PinnedArena::take_idle_chunks() {
  const MutexLock lock(mutex_);
  Idle idle;
  for (auto& [id, guards] : ranges_.idle_blocks()) {
    idle.emplace_back(chunks_.at(id), std::move(guards));
    ranges_.remove_block(id);
    chunks_.erase(id);
  }
  plan_.saw_chunks_given_back();
  return idle;
}

// The chunks are no longer known to the allocator, so no new copy can touch them, and no lock is held during the waits.
uint64_t PinnedArena::release_chunks(const Idle& idle) {
  uint64_t released_bytes = 0;
  for (const auto& [chunk, guards] : idle) {
    // The host waits for every guard: a copy in flight must not lose its pages.
    for (const Point& guard : guards) {
      if (!mutated(Mutant::TrimWaitsForGuards)) synchronize_(guard);
    }
    if (free_chunk(chunk, registration_)) released_bytes += chunk.nbytes;
  }
  return released_bytes;
}

}  // namespace torchoffload
