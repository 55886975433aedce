// storage_stress: random copies out and in through both stores, from several threads at once and ordered as the engine
// orders them, while memory, disk, reads and writes fail. Meant for ThreadSanitizer: a missing order is a data race on
// a slot's bytes, a wrong one is wrong bytes. `make fuzz` builds and runs it, under ASan and UBSan as well.
//
// A round is one store of its own with both queues. In the arena a copy is a slow memcpy, so that it is this program's
// reads and writes that race; in the spill file it is the store's own I/O. The arena grows ahead as well, shrinks, and
// in some rounds is stopped halfway.
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver.h"
#include "growth_model.h"
#include "storage/io_queue.h"
#include "storage/pinned_arena.h"
#include "storage/spill_file.h"
#include "storage_faults.h"

namespace torchoffload::fuzz {
namespace {

constexpr unsigned kHostCount = 3;
constexpr unsigned kStepsPerHost = 150;
constexpr unsigned kReadAttempts = 50;
constexpr StreamId kOffloadStream = 0;
constexpr StreamId kReloadStream = 1;

// What a run shows only if each of it happens.
const std::vector<std::string_view> kWanted = {"arena round",
                                               "spill round",
                                               "offload",
                                               "reload",
                                               "second reload",
                                               "released before the wait",
                                               "dropped in flight",
                                               "reused slot",
                                               "grow",
                                               "grow refused",
                                               "write failed",
                                               "read failed",
                                               "trim",
                                               "trim released",
                                               "reserve",
                                               "grow ahead",
                                               "grow on need",
                                               "chunk ahead",
                                               "shrink released",
                                               "stop",
                                               "past the cache",
                                               "through the cache",
                                               "driver refused",
                                               "driver kept",
                                               "short transfer",
                                               "interrupted",
                                               "punch failed",
                                               "threads ended"};

enum class StoreKind : uint8_t { Arena, Spill };

class World {
 public:
  World(StoreKind kind, uint64_t seed)
      : kind_(kind),
        locks_all_(seed % 4 < 2),
        offload("offload-io", 3, [this](const IoJob& job) { return transfer(job); }),
        reload("reload-io", 3, [this](const IoJob& job) { return transfer(job); }) {
    faults().begin(seed);
    growth().begin();
    const auto wait = [this](Point point) { queue(point.stream).wait_for(point.serial); };
    if (kind == StoreKind::Arena) {
      arena_ = std::make_unique<PinnedArena>(kWatchedDriver, wait, ChunkPolicy{1 << 17, 1 << 19}, kArenaPageBytes);
      if (locks_all_) arena_->refuse_plain_memory(true);
    } else {
      spill_ = std::make_unique<SpillFile>(std::filesystem::temp_directory_path(), wait, ChunkPolicy{1 << 16, 1 << 17});
    }
  }

  SlotStore& store() { return kind_ == StoreKind::Arena ? static_cast<SlotStore&>(*arena_) : *spill_; }
  uint64_t largest_bytes() const { return kind_ == StoreKind::Arena ? 1 << 19 : 3 << 14; }

  // As at the end of a process, with the other hosts still at work.
  void stop() {
    store().stop();
    if (kind_ == StoreKind::Arena) growth().stopped();
    is_stopped_ = kind_ == StoreKind::Arena;
  }

  void check() const { kind_ == StoreKind::Arena ? arena_->check_invariants() : spill_->check_invariants(); }

  // Nothing is in flight or in use any more.
  void finish(Coverage& coverage) {
    offload.wait_for(offload.submitted());
    reload.wait_for(reload.submitted());
    check();
    expect(store().used_bytes() == 0, "a slot was not released");
    faults().stop();
    if (kind_ == StoreKind::Spill && spill_->is_open())
      coverage.saw(spill_->uses_direct_io() ? "past the cache" : "through the cache");
    store().trim();
    expect(kind_ == StoreKind::Arena || !spill_->is_open(), "an empty spill file is still open after trim()");
    if (kind_ == StoreKind::Arena) growth().finish(store().capacity_bytes(), locks_all_, coverage);
    expect(is_stopped_ || store().capacity_bytes() == 0, "an idle store holds memory or disk after trim()");
    coverage.saw(kind_ == StoreKind::Arena ? "arena round" : "spill round");
    faults().report(coverage);
  }

 private:
  IoQueue& queue(StreamId stream) { return stream == kOffloadStream ? offload : reload; }

  std::string transfer(const IoJob& job) {
    const bool is_out = job.direction == IoDirection::Out;
    if (kind_ == StoreKind::Spill)
      return is_out ? spill_->write(job.slot, job.memory, job.nbytes) : spill_->read(job.memory, job.slot, job.nbytes);
    if (faults().happens(4)) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (faults().happens(16)) return "a planted failure";
    std::memcpy(is_out ? job.slot.address : job.memory, is_out ? job.memory : job.slot.address, job.nbytes);
    return {};
  }

  const StoreKind kind_;
  const bool locks_all_;  // else it takes plain memory where the driver refuses to lock some
  std::atomic<bool> is_stopped_{false};
  std::unique_ptr<PinnedArena> arena_;
  std::unique_ptr<SpillFile> spill_;

 public:
  IoQueue offload, reload;  // they end before the store
};

struct Copy {
  Slot slot;
  std::vector<std::byte> source, target;
  uint64_t offload_serial = 0;
  uint64_t reload_serial = 0;
};

// One host thread of the engine.
class Host {
 public:
  Host(World& world, uint64_t seed) : world_(world), random_(seed) {}

  void run() {
    is_host = true;
    for (unsigned step = 0; step < kStepsPerHost; ++step) {
      forget_ended();
      switch (below(16)) {
        case 0:
          plan();
          break;
        case 1:
          below(2) == 0 ? look() : trim_or_shrink();
          break;
        case 2:
        case 3:
          drop(take());
          break;
        case 4:
        case 5:
        case 6:
        case 7:
          reload_and_check(take());
          break;
        default:
          offload();
      }
    }
    while (!copies_.empty()) reload_and_check(take());
    world_.offload.wait_for(last_serial_);
    forget_ended();
  }

  Coverage coverage;

 private:
  uint64_t below(uint64_t limit) { return random_() % limit; }

  void offload() {
    auto copy = std::make_unique<Copy>();
    copy->source.resize(1 + below(world_.largest_bytes()));
    const auto first = static_cast<unsigned>(below(251));
    for (size_t at = 0; at < copy->source.size(); at += 64) copy->source[at] = std::byte((first + at / 64) % 251);
    std::vector<Point> guards;
    const auto slot = acquire(copy->source.size(), guards);
    if (!slot) return;
    copy->slot = *slot;
    // The slot's last use may still be running: reads by reloads, and writes whose record was dropped. As on any
    // stream, its own earlier copies need no wait.
    for (const Point& guard : guards) {
      if (guard.stream == kReloadStream) world_.offload.run_after(world_.reload, guard.serial);
      coverage.saw("reused slot");
    }
    copy->offload_serial =
        world_.offload.submit({IoDirection::Out, copy->slot, copy->source.data(), copy->source.size()});
    last_serial_ = copy->offload_serial;
    copies_.push_back(std::move(copy));
    coverage.saw("offload");
  }

  // What another thread takes in between is not ours: it is asked for again.
  std::optional<Slot> acquire(uint64_t nbytes, std::vector<Point>& guards) {
    while (true) {
      if (auto slot = world_.store().try_acquire(nbytes, guards)) {
        expect(slot->nbytes() == world_.store().slot_bytes(nbytes), "a slot of another size");
        return slot;
      }
      try {
        world_.store().grow(nbytes);
        coverage.saw("grow");
      } catch (const StoreFull&) {
        coverage.saw("grow refused");
        return std::nullopt;
      }
    }
  }

  std::unique_ptr<Copy> take() {
    if (copies_.empty()) return nullptr;
    std::swap(copies_[below(copies_.size())], copies_.back());
    std::unique_ptr<Copy> copy = std::move(copies_.back());
    copies_.pop_back();
    return copy;
  }

  void release(const Copy& copy) {
    std::vector<Point> guards{{kOffloadStream, copy.offload_serial}};
    if (copy.reload_serial > 0) guards.push_back({kReloadStream, copy.reload_serial});
    world_.store().release(copy.slot, guards);
  }

  void reload_and_check(std::unique_ptr<Copy> copy) {
    if (!copy) return;
    copy->target.assign(copy->source.size(), std::byte{255});
    submit_reload(*copy);
    if (below(4) == 0) {  // one target, one after the other
      submit_reload(*copy);
      coverage.saw("second reload");
    }
    const bool is_released_early = below(2) == 0;  // at once in host time, guarded by what is in flight
    if (is_released_early) {
      release(*copy);
      coverage.saw("released before the wait");
    }
    world_.reload.wait_for(copy->reload_serial);
    expect(world_.offload.is_reached(copy->offload_serial), "a reload ended before its offload");
    const bool is_written = world_.offload.failure(copy->offload_serial).empty();
    if (!is_written) coverage.saw("write failed");
    bool is_read = is_read_now(*copy);
    for (unsigned attempt = 0; is_written && !is_read && !is_released_early; ++attempt) {
      expect(attempt < kReadAttempts, "reading fails for ever");
      submit_reload(*copy);
      world_.reload.wait_for(copy->reload_serial);
      is_read = is_read_now(*copy);
    }
    expect(!is_written || !is_read || copy->target == copy->source, "other bytes came back");
    if (!is_released_early) release(*copy);
    world_.offload.forget(copy->offload_serial);
    world_.reload.forget(copy->reload_serial);
    coverage.saw("reload");
  }

  void submit_reload(Copy& copy) {
    world_.reload.run_after(world_.offload, copy.offload_serial);  // the slot's bytes are complete only then
    if (copy.reload_serial > 0) world_.reload.forget(copy.reload_serial);
    copy.reload_serial = world_.reload.submit({IoDirection::In, copy.slot, copy.target.data(), copy.target.size()});
  }

  bool is_read_now(const Copy& copy) {
    const bool is_read = world_.reload.failure(copy.reload_serial).empty();
    if (!is_read) coverage.saw("read failed");
    return is_read;
  }

  // A record dropped with its copy in flight: the slot goes back at once, the source only when the copy is done.
  void drop(std::unique_ptr<Copy> copy) {
    if (!copy) return;
    release(*copy);
    world_.offload.forget(copy->offload_serial);
    dropped_.push_back(std::move(copy));
    coverage.saw("dropped in flight");
  }

  void forget_ended() {
    std::erase_if(dropped_, [&](const auto& copy) { return world_.offload.is_reached(copy->offload_serial); });
  }

  void plan() {
    SlotStore& store = world_.store();
    switch (below(4)) {
      case 0:
        store.reserve(below(kMostAheadBytes + 1));
        return coverage.saw("reserve");
      case 1:
        store.grow_on_need();
        return coverage.saw("grow on need");
      default:
        store.grow_ahead(below(kMostAheadBytes + 1));
        return coverage.saw("grow ahead");
    }
  }

  void trim_or_shrink() {
    if (below(60) == 0) {
      world_.stop();
      coverage.saw("stop");
    } else if (below(2) == 0) {
      coverage.saw("trim");
      if (world_.store().trim() > 0) coverage.saw("trim released");
      if (world_.offload.is_idle()) coverage.saw("threads ended");
      world_.offload.end_idle_threads();
      world_.reload.end_idle_threads();
    } else if (world_.store().shrink(below(world_.store().capacity_bytes() + 1)) > 0) {
      coverage.saw("shrink released");
    }
  }

  void look() {
    SlotStore& store = world_.store();
    world_.check();
    expect(store.take_peak_bytes() <= kHostCount * kStepsPerHost * world_.largest_bytes(), "a peak of nothing");
    (void)(store.used_bytes() + store.capacity_bytes() + store.grow_count());
  }

  World& world_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Copy>> copies_, dropped_;
  uint64_t last_serial_ = 0;
};

void play(uint64_t seed, Coverage& coverage) {
  World world(seed % 2 == 0 ? StoreKind::Arena : StoreKind::Spill, seed);
  std::mutex mutex;  // guards the two below
  std::exception_ptr error;
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < kHostCount; ++number) {
    threads.emplace_back([&, number] {
      Host host(world, seed * kHostCount + number);
      try {
        host.run();
      } catch (...) {
        std::lock_guard lock(mutex);
        error = std::current_exception();
        // What is in flight still touches the copies of this host.
        world.offload.wait_for(world.offload.submitted());
        world.reload.wait_for(world.reload.submitted());
      }
      std::lock_guard lock(mutex);
      coverage.add(host.coverage);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
  world.finish(coverage);
}

}  // namespace
}  // namespace torchoffload::fuzz

int main(int argc, char** argv) {
  using namespace torchoffload::fuzz;
  return drive("storage_stress", parse_options(argc, argv), kWanted, play);
}
