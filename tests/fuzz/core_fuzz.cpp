// core_fuzz: random lives of records over Ledger, CopyWindows and RangeAllocator together, as an engine would lead
// them, and now and then as it must not; then random tapes through Learner and plan. After each step the invariants
// hold, and models that are too simple to be wrong say the same. `make fuzz` builds and runs it under ASan and UBSan.
#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/extent.h"
#include "core/windows.h"
#include "driver.h"
#include "ledger_model.h"
#include "plan_fuzz.h"
#include "range_model.h"
#include "windows_model.h"

namespace torchoffload::fuzz {
namespace {

constexpr uint64_t kBlockBytes = 64 * kAlignmentBytes;
constexpr uint64_t kStorageBytes = 16 * kAlignmentBytes;
constexpr unsigned kStepsPerRound = 1500;

// What a run shows only if each of it happens.
const std::vector<std::string_view> kWanted = {
    "open tape",    "close tape",    "new record",    "join",           "join after its source",
    "release",      "tape gone",     "begin offload", "finish offload", "use source",
    "begin reload", "finish reload", "weaken",        "pass by",        "keep",
    "see",          "see again",     "refused",       "store full",     "exact fit",
    "reused range", "grow",          "shrink",        "reload ahead",   "window full",
    "missed",       "passed by",     "long loop",     "stale id",       "wrong release"};

class World {
 public:
  World(uint64_t seed, Coverage& coverage) : random_(seed), coverage_(coverage) { ranges_.grow(kBlockBytes); }

  void run() {
    for (unsigned step = 0; step < kStepsPerRound; ++step) {
      do_something();
      check();
    }
    while (!model_.handles.empty()) drop_handle();
    for (const TapeId tape : std::exchange(open_tapes_, {})) ledger_.close_tape(tape);
    check();
    expect(ledger_.live_records() == 0 && ledger_.live_tapes() == 0, "something outlives its last handle");
    expect(ranges_.used_bytes() == 0, "a slot outlives its record");
    PlanFuzz(random_()).run();
  }

 private:
  uint64_t below(uint64_t limit) { return random_() % limit; }
  template <typename T>
  T& pick(std::vector<T>& from) {
    return from[below(from.size())];
  }

  void do_something() {
    switch (below(18)) {
      case 0:
        return open_tape();
      case 1:
        return below(8) == 0 ? close_tape() : void();
      case 2:
      case 3:
        return save();
      case 4:
      case 5:
        return drop_handle();
      case 6:
        return ask_for_what_is_gone();
      case 7:
        return below(8) == 0 ? grow_or_shrink() : void();
      case 8:
        return reload_ahead();
      case 9:
        return let_pass();
      case 10:
        return below(30) == 0 ? loop_without_backward() : void();
      case 11:
        return release_what_is_not_in_use();
      default:
        return model_.handles.empty() ? void() : transition(pick(model_.handles));
    }
  }

  // ---- tapes and saves ----

  void open_tape() {
    if (open_tapes_.size() >= 3) return;
    open_tapes_.push_back(ledger_.open_tape());
    tape_windows_[open_tapes_.back().index] = {};
    coverage_.saw("open tape");
  }

  void close_tape() {
    if (open_tapes_.empty()) return;
    std::swap(pick(open_tapes_), open_tapes_.back());
    const TapeId tape = open_tapes_.back();
    open_tapes_.pop_back();
    const bool has_records = model_.has_records(tape);
    tape_windows_[tape.index].close(ledger_.tape(tape).end_save());
    const bool gone = ledger_.close_tape(tape).gone;
    coverage_.saw("close tape");
    expect(!ledger_.is_open(tape), "a tape is open after it was closed");
    expect(gone != has_records, "a closed tape goes when it has no records, and only then");
    if (gone) return;
    closed_tapes_.push_back(tape);
    expect(tape_windows_[tape.index].reload_place() == ledger_.tape(tape).end_save(),
           "reloads do not begin at the tape's end");
  }

  Identity some_identity() {
    static const char objects[8] = {};  // addresses only; never followed
    const uint64_t storage = below(4);
    Identity identity{.storage = objects + storage, .data = objects + storage, .nbytes = 16 * kAlignmentBytes};
    identity.version_counter = objects + 4 + below(2);
    identity.version = static_cast<uint32_t>(below(2));
    if (below(3) == 0) identity.wrapper_counter = objects + 6 + below(2);
    if (identity.wrapper_counter != nullptr) identity.wrapper_version = static_cast<uint32_t>(below(2));
    return identity;
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
    model_.check_found(id, tape, identity, span, itemsize);
    const bool is_new = !id;
    if (is_new) {
      const Span moved = span_to_move(span, identity.nbytes);
      expect(moved.contains(span) && moved.end <= identity.nbytes, "what moves is less than what was saved, or more");
      id = ledger_.add_record(tape, identity, moved, Decision::move_to(Placement::Host));
      largest_record_bytes_ = std::max(largest_record_bytes_, moved.nbytes());
      model_.add_record(*id, tape, identity, moved);
    } else if (!model_.holding(*id).has_source()) {
      coverage_.saw("join after its source");
    }
    model_.add_handle(*id, ledger_.add_handle(*id), is_new);
    coverage_.saw(is_new ? "new record" : "join");
  }

  void loop_without_backward() {
    const size_t before = model_.handles.size();
    for (unsigned count = 0; count < 100; ++count) save();
    while (model_.handles.size() > before) drop_handle();
    coverage_.saw("long loop");
  }

  void drop_handle() {
    if (model_.handles.empty()) return;
    std::swap(pick(model_.handles), model_.handles.back());
    const Handle handle = model_.handles.back();
    model_.handles.pop_back();
    const Holding before = model_.holding(handle.record);
    const Ledger::DroppedHandle dropped = ledger_.drop_handle(handle.record, handle.mark);
    expect(dropped.released == !model_.has_handles(handle.record), "the last handle, and only it, releases a record");
    expect(dropped.was == before.state && dropped.tape == before.tape, "a dropped handle tells of another record");
    if (dropped.tape_gone) {
      coverage_.saw("tape gone");
      expect(std::erase(closed_tapes_, dropped.tape) == 1, "a tape goes that was not closed");
    }
    if (!dropped.released) return;
    coverage_.saw("release");
    expect(!ledger_.is_live(handle.record), "a released record is alive");
    gone_ = handle.record;
    Holding released = model_.remove(handle.record);
    give_slot_back(released);
  }

  // ---- transitions ----

  void transition(Handle& handle) {
    const RecordId id = handle.record;
    const RecordState state = model_.holding(id).state;
    const bool has_slot = model_.holding(id).slot.has_value();
    const Change changes[] = {
        {"finish offload", state == RecordState::Offloading, RecordState::Offloaded, &Ledger::finish_offload},
        {"use source", model_.holding(id).has_source(), RecordState::Reloaded, &Ledger::use_source},
        {"begin reload", state == RecordState::Offloaded, RecordState::Reloading, &Ledger::begin_reload},
        {"finish reload", state == RecordState::Reloading, RecordState::Reloaded, &Ledger::finish_reload},
        {"weaken", state == RecordState::Reloaded && has_slot, RecordState::Offloaded, &Ledger::weaken},
        {"pass by", state == RecordState::Reloading, RecordState::Offloaded, &Ledger::pass_by},
    };
    // Mostly what comes next in a life, or few would get far.
    const uint64_t next[] = {6, 0, 2, 3, below(3) == 0 ? 8U : 4U};  // by state, as in RecordState
    const uint64_t choice = below(4) == 0 ? below(9) : next[static_cast<size_t>(state)];
    if (choice == 6) return offload(id);
    if (choice == 7) return keep(id);
    if (choice == 8) return see(handle);
    const Change& change = changes[choice];
    const bool is_done = attempt(change.what, id, change.is_allowed, change.to, [&] { (ledger_.*change.how)(id); });
    if (is_done && (change.to == RecordState::Reloading || change.to == RecordState::Reloaded))
      reloaded(change.what, id);
  }

  struct Change {
    std::string_view what;
    bool is_allowed;
    RecordState to;
    void (Ledger::*how)(RecordId);
  };

  void reloaded(std::string_view what, RecordId id) {
    if (what == "finish reload") return;  // it counts from its beginning
    model_.reloaded(id);
    if (what == "begin reload") model_.holding(id).guards.push_back({1 + static_cast<StreamId>(below(2)), ++serial_});
  }

  void see(Handle& handle) {
    coverage_.saw(handle.was_given ? "see again" : "see");
    handle.mark = ledger_.mark_seen(handle.record, handle.mark);
    handle.was_given = model_.was_reloaded(handle.record);
  }

  // Does `change` to the record where that is allowed; where not, it must throw, and check() sees that nothing changed.
  bool attempt(std::string_view what, RecordId id, bool is_allowed, RecordState to,
               const std::function<void()>& change) {
    try {
      change();
    } catch (const std::logic_error&) {
      expect(!is_allowed, "an allowed transition threw");
      coverage_.saw("refused");
      return false;
    }
    expect(is_allowed, "a transition from a wrong state did not throw");
    coverage_.saw(what);
    model_.holding(id).state = to;
    model_.holding(id).is_prefetched = false;
    return true;
  }

  void offload(RecordId id) {
    Holding& holding = model_.holding(id);
    const bool is_allowed = holding.state == RecordState::Resident && !holding.is_kept;
    if (is_allowed) {
      holding.slot = acquire(holding.span.nbytes());
      if (!holding.slot) return keep(id);
      holding.guards = {{0, ++serial_}};
    }
    attempt("begin offload", id, is_allowed, RecordState::Offloading, [&] { ledger_.begin_offload(id); });
  }

  void keep(RecordId id) {
    Holding& holding = model_.holding(id);
    if (!attempt("keep", id, holding.has_source(), RecordState::Resident, [&] { ledger_.keep(id, Reason::TierFull); }))
      return;
    holding.is_kept = true;
    give_slot_back(holding);
  }

  // ---- ranges ----

  std::optional<Range> acquire(uint64_t nbytes) {
    const uint64_t largest_bytes = ranges_.largest_free_bytes();
    bool is_reused = false;
    const std::optional<Range> range = ranges_.acquire(nbytes, serial_, is_reused);
    if (!range) coverage_.saw("store full");
    if (range && range->nbytes == largest_bytes) coverage_.saw("exact fit");
    if (is_reused) coverage_.saw("reused range");
    return range;
  }

  void give_slot_back(Holding& holding) {
    if (!holding.slot) return;
    if (below(8) == 0) holding.guards.push_back({2, 0});  // a beginning: always reached, guards nothing
    ranges_.release(*holding.slot, holding.guards);
    holding.slot.reset();
    holding.guards.clear();
  }

  void release_what_is_not_in_use() {
    const Range range{static_cast<BlockId>(below(4)), below(64) * kAlignmentBytes, kAlignmentBytes};
    if (ranges_.refuses(range)) coverage_.saw("wrong release");
  }

  void grow_or_shrink() {
    if (ranges_.shrink()) return coverage_.saw("shrink");
    ranges_.grow(kBlockBytes * (1 + below(3)));
    coverage_.saw("grow");
  }

  // ---- windows ----

  uint64_t some_save(const Tape& tape) { return tape.first_save + below(tape.saves.size()); }

  void reload_ahead() {
    if (closed_tapes_.empty()) return;
    const TapeId id = pick(closed_tapes_);
    const Tape& tape = ledger_.tape(id);
    TapeWindows& its = tape_windows_[id.index];
    const uint64_t window_bytes =
        below(4) == 0 ? below(kBlockBytes) : default_windows({}, largest_record_bytes_).reload_bytes;
    const uint64_t ahead_bytes = below(window_bytes + 1);
    if (below(4) == 0) {
      coverage_.saw("missed");
      its.consumer_missed(some_save(tape), some_save(tape));
    }
    const auto taken = WindowsModel(ledger_, model_).take_reloads(windows_, its, id, ahead_bytes, window_bytes);
    if (its.reload_place() > tape.first_save) coverage_.saw("window full");
    for (const auto& [record, save] : taken) {
      coverage_.saw("reload ahead");
      attempt("begin reload", record, true, RecordState::Reloading,
              [&, at = save, ahead = record] { ledger_.begin_reload_ahead(ahead, at); });
      reloaded("begin reload", record);
      model_.holding(record).is_prefetched = true;
    }
  }

  void let_pass() {
    if (closed_tapes_.empty()) return;
    const TapeId id = pick(closed_tapes_);
    std::vector<RecordId> ahead;
    for (const auto& [index, holding] : model_.holdings()) {
      if (holding.is_prefetched) ahead.push_back(holding.id);
    }
    if (gone_) ahead.push_back(*gone_);
    const uint64_t save = some_save(ledger_.tape(id));
    for (const RecordId each : WindowsModel(ledger_, model_).passed_by(id, save, ahead, below(kBlockBytes))) {
      coverage_.saw("passed by");
      attempt("pass by", each, true, RecordState::Offloaded, [&] { ledger_.pass_by(each); });
    }
  }

  void ask_for_what_is_gone() {
    if (!gone_) return;
    expect(!ledger_.is_live(*gone_), "a released record came back");
    try {
      ledger_.finish_offload(*gone_);
    } catch (const std::logic_error&) {
      return coverage_.saw("stale id");
    }
    expect(false, "a released record was used");
  }

  void check() {
    model_.check(ledger_);
    ranges_.check();
    expect(ledger_.live_tapes() == open_tapes_.size() + closed_tapes_.size(), "tapes were lost or made up");
  }

  std::mt19937_64 random_;
  Coverage& coverage_;
  Ledger ledger_;
  CopyWindows windows_;
  std::map<uint32_t, TapeWindows> tape_windows_;  // by index
  uint64_t largest_record_bytes_ = 0;
  CheckedRanges ranges_;
  LedgerModel model_;
  std::vector<TapeId> open_tapes_, closed_tapes_;
  std::optional<RecordId> gone_;
  uint64_t serial_ = 0;
};

}  // namespace
}  // namespace torchoffload::fuzz
int main(int argc, char** argv) {
  using namespace torchoffload::fuzz;
  return drive("core_fuzz", parse_options(argc, argv), kWanted,
               [](uint64_t seed, Coverage& coverage) { World(seed, coverage).run(); });
}
