// core_fuzz: random lives of records over Ledger, Schedule and RangeAllocator together, as an engine would lead them,
// and now and then as it must not. After each step the invariants hold, and what the three say is what was done to
// them.
//
//     g++ -std=c++20 -g -O1 -fsanitize=address,undefined -Icsrc tests/fuzz/core_fuzz.cpp csrc/core/*.cpp -o core_fuzz
//     ./core_fuzz [seed] [seconds]
//
// A failure names the seed of its round; `core_fuzz SEED 0` plays that round alone.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/ledger.h"
#include "core/range_allocator.h"
#include "core/schedule.h"

namespace torchoffload {
namespace {

constexpr uint64_t kBlockBytes = 64 * kAlignmentBytes;
constexpr unsigned kStepsPerRound = 1500;
constexpr unsigned kManyRecords = 100;
constexpr size_t kStreamCount = 3;

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

struct Handle {
  RecordId record;
  uint64_t save = 0;
  uint32_t seen_epoch = 0;
};

// What an engine keeps beside the ledger, for each record.
struct Holding {
  RecordId id;
  std::optional<Range> slot;
  std::vector<Point> guards;  // the copies that touched the slot
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed) { ranges_.add_block(kBlockBytes); }

  void run() {
    for (unsigned step = 0; step < kStepsPerRound; ++step) {
      do_something();
      check();
    }
    while (!handles_.empty()) drop_handle();
    for (const TapeId tape : std::exchange(open_tapes_, {})) ledger_.close_tape(tape);
    check();
    expect(ledger_.live_records() == 0 && ledger_.live_tapes() == 0, "something outlives its last handle");
    expect(ranges_.used_bytes() == 0, "a slot outlives its record");
  }

 private:
  uint64_t below(uint64_t limit) { return random_() % limit; }
  template <typename T>
  T& pick(std::vector<T>& from) {
    return from[below(from.size())];
  }

  void do_something() {
    switch (below(16)) {
      case 0:
        return open_tape();
      case 1:
        return below(8) == 0 ? close_tape() : void();
      case 2:
      case 3:
      case 4:
      case 5:
        return save();
      case 6:
      case 7:
        return drop_handle();
      case 8:
        return ask_for_what_is_gone();
      case 9:
        return below(8) == 0 ? grow_or_shrink() : void();
      case 10:
        return reload_ahead();
      case 11:
        return let_pass();
      case 12:
        return below(30) == 0 ? loop_without_backward() : void();
      default:
        return handles_.empty() ? void() : transition(pick(handles_));
    }
  }

  // ---- tapes and saves ----

  void open_tape() {
    if (open_tapes_.size() < 3) open_tapes_.push_back(ledger_.open_tape());
  }

  void close_tape() {
    if (open_tapes_.empty()) return;
    std::swap(pick(open_tapes_), open_tapes_.back());
    const TapeId tape = open_tapes_.back();
    open_tapes_.pop_back();
    const bool gone = ledger_.close_tape(tape).gone;
    expect(!ledger_.is_open(tape), "a tape is open after it was closed");
    if (gone) return;
    closed_tapes_.push_back(tape);
    expect(ledger_.tape(tape).reload_cursor == ledger_.tape(tape).end_save(), "reloads do not begin at the tape's end");
  }

  Identity some_identity() {
    static const char objects[8] = {};  // addresses only; never followed
    const uint64_t storage = below(4);
    return {objects + storage, objects + 4 + below(2), static_cast<uint32_t>(below(2)), objects + storage,
            16 * kAlignmentBytes};
  }

  Span some_span() {
    const uint64_t begin = 4 * below(2000);
    return {begin, begin + 4 + 4 * below(48)};
  }

  void save() {
    if (open_tapes_.empty()) return;
    const TapeId tape = pick(open_tapes_);
    const Identity identity = some_identity();
    const Span span = below(3) == 0 ? some_span() : Span{0, identity.nbytes};
    const uint64_t itemsize = uint64_t{1} << below(4);
    std::optional<RecordId> id = ledger_.find(tape, identity, span, itemsize);
    if (id) {
      const Record& joined = ledger_.record(*id);
      expect(joined.tape == tape && joined.span.contains(span), "a save joined a record that does not hold its bytes");
      expect((span.begin - joined.span.begin) % itemsize == 0, "a save joined a record off its grid");
      const Identity& known = joined.identity;
      expect(known.storage == identity.storage && known.version_counter == identity.version_counter &&
                 known.version == identity.version,
             "a save joined a record of other bytes");
    } else {
      id = ledger_.add_record(tape, identity, Schedule::span_to_move(span, identity.nbytes));
      schedule_.saw_record(ledger_.record(*id).nbytes());
      expect(ledger_.record(*id).span.contains(span), "what moves is less than what was saved");
      if (holdings_.size() <= id->index) holdings_.resize(id->index + 1);
      holdings_[id->index] = {*id, std::nullopt, {}};
    }
    handles_.push_back({*id, ledger_.add_handle(*id)});
  }

  void loop_without_backward() {
    const size_t before = handles_.size();
    for (unsigned count = 0; count < kManyRecords; ++count) save();
    while (handles_.size() > before) drop_handle();
  }

  void drop_handle() {
    if (handles_.empty()) return;
    std::swap(pick(handles_), handles_.back());
    const Handle handle = handles_.back();
    handles_.pop_back();
    const Record before = ledger_.record(handle.record);
    const Ledger::DroppedHandle dropped = ledger_.drop_handle(handle.record, handle.seen_epoch);
    expect(dropped.released == (before.live_handles == 1), "the last handle, and only it, releases a record");
    expect(dropped.was == before.state && dropped.tape == before.tape, "a dropped handle tells of another record");
    if (dropped.tape_gone) std::erase(closed_tapes_, dropped.tape);
    if (!dropped.released) return;
    expect(!ledger_.is_live(handle.record), "a released record is alive");
    gone_ = handle.record;
    give_slot_back(holdings_[handle.record.index]);
  }

  void give_slot_back(Holding& holding) {
    if (!holding.slot) return;
    ranges_.release(*holding.slot, holding.guards);
    each_granule(*holding.slot, [&](Latest& latest) {
      latest = {};
      for (const Point& guard : holding.guards) latest[guard.stream] = std::max(latest[guard.stream], guard.serial);
    });
    holding.slot.reset();
    holding.guards.clear();
  }

  // Of each stream the latest point that guards a granule.
  using Latest = std::array<uint64_t, kStreamCount>;

  void each_granule(const Range& range, const std::function<void(Latest&)>& visit) {
    for (uint64_t offset = range.offset; offset < range.offset + range.nbytes; offset += kAlignmentBytes)
      visit(guards_of_[{range.block, offset}]);
  }

  void check_guards(const Range& range, const std::vector<Point>& guards) {
    Latest given{};
    for (const Point& guard : guards) {
      expect(guard.serial <= serial_ && given[guard.stream] == 0, "a guard that was never given, or two of one stream");
      given[guard.stream] = guard.serial;
    }
    each_granule(range, [&](const Latest& latest) {
      for (size_t stream = 0; stream < kStreamCount; ++stream)
        expect(given[stream] >= latest[stream], "a range was handed out without a point that guards it");
    });
  }

  // ---- transitions ----

  void transition(Handle& handle) {
    const RecordId id = handle.record;
    const RecordState state = ledger_.record(id).state;
    const bool has_source = state == RecordState::Resident || state == RecordState::Offloading;
    const bool is_movable = state == RecordState::Resident && ledger_.record(id).kept == KeptReason::None;
    switch (below(9)) {
      case 0:
        return offload(id, is_movable);
      case 1:
        return attempt(id, state == RecordState::Offloading, [&] { ledger_.finish_offload(id); });
      case 2:
        return attempt(id, has_source, [&] { ledger_.use_source(id); });
      case 3:
        return reload(id, state == RecordState::Offloaded, std::nullopt);
      case 4:
        return attempt(id, state == RecordState::Reloading, [&] { ledger_.finish_reload(id); });
      case 5:
        return attempt(id, state == RecordState::Reloaded && ledger_.record(id).has_slot, [&] { ledger_.give_up(id); });
      case 6:
        return attempt(id, state == RecordState::Reloading, [&] { ledger_.pass_by(id); });
      case 7:
        return keep(id, has_source);
      default:
        handle.seen_epoch = ledger_.mark_seen(id, handle.seen_epoch);
    }
  }

  // Does `change` to the record where that is allowed; where not, it must throw and change nothing.
  void attempt(RecordId id, bool is_allowed, const std::function<void()>& change) {
    const Record before = ledger_.record(id);
    try {
      change();
    } catch (const std::logic_error&) {
      const Record& after = ledger_.record(id);
      expect(!is_allowed, "an allowed transition threw");
      expect(after.state == before.state && after.kept == before.kept && after.has_slot == before.has_slot &&
                 after.prefetched == before.prefetched && after.unseen == before.unseen && after.epoch == before.epoch,
             "a transition that threw has changed the record");
      return;
    }
    expect(is_allowed, "a transition from a wrong state did not throw");
  }

  void offload(RecordId id, bool is_allowed) {
    Holding& holding = holdings_[id.index];
    if (is_allowed) {
      std::vector<Point> guards;
      holding.slot = ranges_.try_acquire(ledger_.record(id).nbytes(), guards);
      if (!holding.slot) return keep(id, true);
      check_guards(*holding.slot, guards);
      holding.guards = {{0, ++serial_}};
    }
    attempt(id, is_allowed, [&] { ledger_.begin_offload(id); });
  }

  // `expected_at`: the save that it is reloaded for, ahead of the consumer; none if it was asked for.
  void reload(RecordId id, bool is_allowed, std::optional<uint64_t> expected_at) {
    if (is_allowed) holdings_[id.index].guards.push_back({1 + static_cast<StreamId>(below(2)), ++serial_});
    attempt(id, is_allowed,
            [&] { expected_at ? ledger_.begin_reload_ahead(id, *expected_at) : ledger_.begin_reload(id); });
  }

  void keep(RecordId id, bool is_allowed) {
    if (is_allowed) give_slot_back(holdings_[id.index]);
    attempt(id, is_allowed, [&] { ledger_.keep(id, KeptReason::HostFull); });
  }

  // ---- schedule ----

  uint64_t some_save(const Tape& tape) { return tape.first_save + below(tape.saves.size()); }

  void reload_ahead() {
    if (closed_tapes_.empty()) return;
    const TapeId tape = pick(closed_tapes_);
    const uint64_t window_bytes = schedule_.reload_window_bytes({});
    const uint64_t ahead_bytes = below(window_bytes + 1);
    if (below(4) == 0) {
      Tape& consumed = ledger_.tape(tape);
      Schedule::consumer_missed(consumed, some_save(consumed));
    }
    uint64_t taken_bytes = 0;
    uint64_t last_save = UINT64_MAX;
    for (const auto& [id, save] : Schedule::take_reloads(ledger_, tape, ahead_bytes, window_bytes)) {
      const Record& taken = ledger_.record(id);
      expect(taken.tape == tape && save < last_save, "reloads do not go from the last save to the first");
      expect(ledger_.tape(tape).save(save).record == id, "a reload for a save of another record");
      last_save = save;
      taken_bytes += taken.nbytes();
      reload(id, true, save);
    }
    expect(taken_bytes == 0 || ahead_bytes + taken_bytes <= window_bytes, "more is loaded ahead than the window holds");
  }

  void let_pass() {
    if (closed_tapes_.empty()) return;
    const TapeId tape = pick(closed_tapes_);
    std::vector<RecordId> ahead;
    for (const Holding& holding : holdings_) {
      if (ledger_.is_live(holding.id) && ledger_.record(holding.id).prefetched) ahead.push_back(holding.id);
    }
    const uint64_t save = some_save(ledger_.tape(tape));
    for (const RecordId id : Schedule::passed_by(ledger_, tape, save, ahead, below(kBlockBytes))) {
      expect(ledger_.record(id).tape == tape && ledger_.record(id).expected_at > save, "passed by, and yet to come");
      ledger_.pass_by(id);
    }
  }

  // ---- the rest ----

  void grow_or_shrink() {
    const auto idle = ranges_.idle_blocks();
    if (idle.size() > 1) {
      ranges_.remove_block(idle.front().first);
    } else {
      ranges_.add_block(kBlockBytes * (1 + below(3)));
    }
  }

  void ask_for_what_is_gone() {
    if (!gone_) return;
    expect(!ledger_.is_live(*gone_), "a released record came back");
    try {
      ledger_.finish_offload(*gone_);
    } catch (const std::logic_error&) {
      return;
    }
    expect(false, "a released record was used");
  }

  void check() {
    ledger_.check_invariants();
    ranges_.check_invariants();
    expect(ledger_.live_handles() == handles_.size(), "handles were lost or made up");
    for (const Handle& handle : handles_) {
      const Tape& tape = ledger_.tape(ledger_.record(handle.record).tape);
      expect(tape.save(handle.save).record == handle.record, "a save is not where its number says");
    }
    uint64_t used_bytes = 0;
    uint64_t live_records = 0;
    for (const Holding& holding : holdings_) {
      if (!ledger_.is_live(holding.id)) continue;
      ++live_records;
      expect(ledger_.record(holding.id).has_slot == holding.slot.has_value(), "the ledger knows of another slot");
      if (holding.slot) used_bytes += holding.slot->nbytes;
    }
    expect(live_records == ledger_.live_records(), "records were lost or made up");
    expect(used_bytes == ranges_.used_bytes(), "ranges were lost or made up");
  }

  std::mt19937_64 random_;
  Ledger ledger_;
  Schedule schedule_;
  RangeAllocator ranges_;
  std::vector<TapeId> open_tapes_, closed_tapes_;
  std::vector<Handle> handles_;
  std::vector<Holding> holdings_;  // by record index
  std::optional<RecordId> gone_;
  std::map<std::pair<BlockId, uint64_t>, Latest> guards_of_;  // by block and offset
  uint64_t serial_ = 0;
};

int fuzz(uint64_t first_seed, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint64_t seed = first_seed;
  do {
    try {
      World(seed).run();
    } catch (const std::exception& error) {
      std::printf("core_fuzz, seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
    ++seed;
  } while (Clock::now() < end);
  std::printf("%llu rounds of %u steps, every invariant held\n", static_cast<unsigned long long>(seed - first_seed),
              kStepsPerRound);
  return 0;
}

}  // namespace
}  // namespace torchoffload

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  return torchoffload::fuzz(seed, argc > 2 ? std::atof(argv[2]) : 20.0);
}
