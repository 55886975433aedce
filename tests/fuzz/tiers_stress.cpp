// tiers_stress: slots of a TieredStore in far too little memory, acquired, held, read ahead and released by several
// threads at once, while disks fail. Meant for ThreadSanitizer: a missing order is a data race on a slot's bytes, a
// wrong one is wrong bytes. `make fuzz` builds and runs it, under ASan and UBSan as well.
//
// A round is one store with two disks and threads of its own. What the device does is played by the hosts themselves,
// so a point is reached when the store asks for it, or at the next question.
#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver.h"
#include "storage/tiered_store.h"
#include "storage_faults.h"

namespace torchoffload::fuzz {
namespace {

constexpr unsigned kThreadCount = 4;
constexpr unsigned kStepCount = 150;

const std::vector<std::string_view> kWanted = {"acquired", "no room", "held",    "read failed", "read ahead",
                                               "released", "in vain", "trimmed", "put off"};

class Player {
 public:
  Player(TieredStore& store, uint64_t seed) : store_(store), random_(seed) {}

  Coverage coverage;

  void run() {
    for (unsigned step = 0; step < kStepCount; ++step) {
      const unsigned choice = random_() % 20;
      if (choice < 8 || mine_.empty()) {
        acquire();
      } else if (choice < 13) {
        read(mine_[random_() % mine_.size()]);
      } else if (choice < 15) {
        if (store_.begin_fetch(mine_[random_() % mine_.size()].slot)) coverage.saw("read ahead");
      } else if (choice < 19) {
        release(random_() % mine_.size());
      } else {
        store_.trim();
        store_.check_invariants();
        coverage.saw("trimmed");
      }
    }
    faults().stop();
    for (const Filled& filled : mine_) expect(read(filled), "a sound disk could not be read");
    while (!mine_.empty()) release(0);
  }

 private:
  struct Filled {
    Slot slot;
    std::byte value;
  };

  void acquire() {
    const uint64_t nbytes = kDiskBlockBytes * (1 + random_() % 4);
    std::vector<Point> guards;
    std::optional<Slot> slot;
    if (random_() % 2 == 0 && store_.grow_awaits_disk(nbytes)) return coverage.saw("put off");
    try {
      while (!(slot = store_.try_acquire(nbytes, guards))) store_.grow(nbytes);
    } catch (const StoreFull&) {
      return coverage.saw("no room");
    }
    const auto value = static_cast<std::byte>(random_());
    std::memset(slot->address, static_cast<int>(value), nbytes);
    if (random_() % 8 == 0) {
      store_.release(*slot, {});
      return coverage.saw("in vain");
    }
    store_.note_filled(*slot, {1, ++serial_});
    mine_.push_back({*slot, value});
    coverage.saw("acquired");
  }

  bool read(const Filled& filled) {
    Slot held;
    try {
      held = store_.hold(filled.slot);
    } catch (const std::runtime_error&) {
      coverage.saw("read failed");
      return false;
    }
    for (uint64_t offset = 0; offset < filled.slot.nbytes(); ++offset)
      expect(held.address[offset] == filled.value, "a slot has another one's bytes");
    store_.release_hold(filled.slot, Point{2, ++serial_});
    coverage.saw("held");
    return true;
  }

  void release(size_t index) {
    store_.release(mine_[index].slot, {{3, ++serial_}});
    mine_.erase(mine_.begin() + static_cast<ptrdiff_t>(index));
    coverage.saw("released");
  }

  TieredStore& store_;
  std::mt19937_64 random_;
  std::vector<Filled> mine_;
  uint64_t serial_ = 0;
};

void play(uint64_t seed, Coverage& coverage) {
  std::mt19937_64 random(seed);
  PinnedArena arena({}, [](Point) {}, ChunkPolicy{1 << 16, 1 << 18}, 1 << 14);
  std::atomic<unsigned> questions{0};
  SpillHooks hooks;
  hooks.wait_for_point = [&](Point) { return ++questions % 4 != 0; };
  const std::string directory = std::filesystem::temp_directory_path();
  const SpillPolicy policy{random() % 4 * 3 * kDiskBlockBytes, random() % 2 == 0};
  TieredStore store(arena, {directory, directory}, policy, hooks);
  if (random() % 2 == 0) faults().begin(seed);
  std::mutex mutex;
  std::exception_ptr error;
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < kThreadCount; ++number) {
    threads.emplace_back([&, number] {
      Player player(store, seed * kThreadCount + number);
      try {
        player.run();
      } catch (...) {
        std::lock_guard lock(mutex);
        error = std::current_exception();
      }
      std::lock_guard lock(mutex);
      coverage.add(player.coverage);
    });
  }
  for (std::thread& thread : threads) thread.join();
  faults().stop();
  if (error) std::rethrow_exception(error);
  store.trim();
  expect(store.used_bytes() == 0, "memory is in use with no slot");
  expect(store.disk_used_bytes() == 0, "a disk is in use with no slot");
}

}  // namespace
}  // namespace torchoffload::fuzz

int main(int argc, char** argv) {
  using namespace torchoffload::fuzz;
  return drive("tiers_stress", parse_options(argc, argv), kWanted, play);
}
