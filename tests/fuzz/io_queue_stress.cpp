// io_queue_stress: random copies out and in over two queues, ordered as the engine orders them, meant for
// -fsanitize=thread: a missing order is a data race on the pretended file, a wrong one is wrong bytes.
//
//     sources="tests/fuzz/io_queue_stress.cpp csrc/storage/io_queue.cpp csrc/storage/process.cpp"
//     g++ -std=c++20 -g -O1 -fsanitize=thread -Icsrc $sources csrc/core/range_allocator.cpp -o io_queue_stress
//     ./io_queue_stress [seed] [steps]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/range_allocator.h"
#include "storage/io_queue.h"

namespace torchoffload {
namespace {

constexpr uint64_t kGranuleBytes = 64;
constexpr uint64_t kFileBytes = 64 * kGranuleBytes;  // small: slots are reused all the time
constexpr StreamId kOffloadStream = 0;
constexpr StreamId kReloadStream = 1;

// Bytes with no lock of their own, moved by slow and uneven transfers.
class PretendedFile {
 public:
  std::string transfer(const IoJob& job) {
    thread_local std::minstd_rand random(std::hash<std::thread::id>()(std::this_thread::get_id()));
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    std::byte* slot = bytes_.data() + job.slot.range.offset;
    const bool is_out = job.direction == IoDirection::Out;
    std::memcpy(is_out ? slot : job.memory, is_out ? job.memory : slot, job.nbytes);
    return random() % 16 == 0 ? "a planted failure" : "";
  }

 private:
  std::vector<std::byte> bytes_ = std::vector<std::byte>(kFileBytes);
};

struct World {
  PretendedFile file;
  IoQueue offload{"offload-io", 3, [this](const IoJob& job) { return file.transfer(job); }};
  IoQueue reload{"reload-io", 3, [this](const IoJob& job) { return file.transfer(job); }};
  std::mutex mutex;  // guards ranges
  RangeAllocator ranges{kGranuleBytes};
};

struct Copy {
  Slot slot;
  std::vector<std::byte> source;
  std::vector<std::byte> target;
  uint64_t offload_serial = 0;
  uint64_t reload_serial = 0;
};

// One host thread of the engine: starts copies, reloads them, drops some early, and checks what comes back.
class Host {
 public:
  Host(World& world, unsigned seed) : world_(world), random_(seed) {}

  void run(unsigned step_count) {
    for (unsigned step = 0; step < step_count; ++step) {
      const unsigned choice = random_() % 4;
      if (choice < 2) offload();
      if (choice == 2) reload_and_check();
      if (choice == 3) drop();
    }
    while (!copies_.empty()) reload_and_check();
    world_.offload.wait_for(last_serial_);
  }

 private:
  void offload() {
    auto copy = std::make_unique<Copy>();
    copy->source.assign(1 + random_() % (8 * kGranuleBytes), std::byte(random_() % 256));
    std::vector<Point> guards;
    {
      std::lock_guard lock(world_.mutex);
      const auto range = world_.ranges.try_acquire(copy->source.size(), guards);
      if (!range) return;
      copy->slot.range = *range;
    }
    // The slot's last use may still be running: reads by reloads, and writes whose record was dropped.
    // As on any stream, its own earlier copies need no wait.
    for (const Point& guard : guards) {
      if (guard.stream != kOffloadStream) world_.offload.run_after(world_.reload, guard.serial);
    }
    copy->offload_serial =
        world_.offload.submit({IoDirection::Out, copy->slot, copy->source.data(), copy->source.size()});
    last_serial_ = copy->offload_serial;
    copies_.push_back(std::move(copy));
  }

  std::unique_ptr<Copy> take() {
    if (copies_.empty()) return nullptr;
    std::swap(copies_[random_() % copies_.size()], copies_.back());
    std::unique_ptr<Copy> copy = std::move(copies_.back());
    copies_.pop_back();
    return copy;
  }

  void release(const Copy& copy, Point guard) {
    std::lock_guard lock(world_.mutex);
    world_.ranges.release(copy.slot.range, {guard});
  }

  void reload_and_check() {
    const auto copy = take();
    if (!copy) return;
    copy->target.assign(copy->source.size(), std::byte{0});
    world_.reload.run_after(world_.offload, copy->offload_serial);  // the slot's bytes are complete only then
    for (int times = 1 + random_() % 2; times > 0; --times) {       // twice: one target, one after the other
      copy->reload_serial =
          world_.reload.submit({IoDirection::In, copy->slot, copy->target.data(), copy->target.size()});
    }
    release(*copy, {kReloadStream, copy->reload_serial});
    world_.reload.wait_for(copy->reload_serial);
    if (copy->target != copy->source) throw std::runtime_error("other bytes came back");
    const std::string failure = world_.reload.failure(copy->reload_serial);
    if (!failure.empty() && failure != "a planted failure") throw std::runtime_error(failure);
  }

  // A record dropped with its copy in flight: the slot goes back at once, the source only when the copy is done.
  void drop() {
    const auto copy = take();
    if (!copy) return;
    release(*copy, {kOffloadStream, copy->offload_serial});
    world_.offload.wait_for(copy->offload_serial);
  }

  World& world_;
  std::minstd_rand random_;
  std::vector<std::unique_ptr<Copy>> copies_;
  uint64_t last_serial_ = 0;
};

int stress(unsigned seed, unsigned step_count) {
  World world;
  world.ranges.add_block(kFileBytes);
  std::vector<std::thread> threads;
  for (unsigned host = 0; host < 3; ++host) {
    threads.emplace_back([&world, seed, host, step_count] { Host(world, seed * 3 + host).run(step_count); });
  }
  for (std::thread& thread : threads) thread.join();
  world.reload.wait_for(world.reload.submitted());
  world.offload.wait_for(world.offload.submitted());
  world.ranges.check_invariants();
  std::printf("%llu copies out, %llu in, all as written\n", static_cast<unsigned long long>(world.offload.submitted()),
              static_cast<unsigned long long>(world.reload.submitted()));
  return world.ranges.used_bytes() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace torchoffload

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  return torchoffload::stress(seed, argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 2000);
}
