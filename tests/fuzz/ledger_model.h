// LedgerModel: what a Ledger should say, from one entry for each handle, with no index and no count kept.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "core/ledger.h"
#include "core/range_allocator.h"
#include "driver.h"

namespace torchoffload::fuzz {

struct Handle {
  RecordId record;
  uint64_t save = 0;
  uint64_t bytes_before = 0;
  uint32_t mark = 0;       // as mark_seen returned it
  bool was_given = false;  // the bytes, since the last reload
};

// A record, and what an engine keeps beside the ledger.
struct Holding {
  RecordId id;
  TapeId tape;
  Identity identity;
  Span span;
  RecordState state = RecordState::Resident;
  bool is_kept = false;
  bool is_prefetched = false;
  std::optional<Range> slot;
  std::vector<Point> guards;  // the copies that touched the slot

  bool has_source() const { return state == RecordState::Resident || state == RecordState::Offloading; }
};

class LedgerModel {
 public:
  std::vector<Handle> handles;

  Holding& holding(RecordId id) { return holdings_.at(id.index); }
  const std::map<uint32_t, Holding>& holdings() const { return holdings_; }

  bool has_handles(RecordId id) const {
    return std::any_of(handles.begin(), handles.end(), [&](const Handle& handle) { return handle.record == id; });
  }
  bool has_records(TapeId tape) const {
    return std::any_of(holdings_.begin(), holdings_.end(),
                       [&](const auto& entry) { return entry.second.tape == tape; });
  }

  // Does the record stand for these bytes?
  static bool is_joinable(const Holding& known, const Identity& identity, const Span& span, uint64_t itemsize) {
    const Identity& its = known.identity;
    const bool is_same_tensor = its.version_counter == identity.version_counter && its.version == identity.version;
    const bool is_same_wrapper = identity.wrapper_counter != nullptr &&
                                 its.wrapper_counter == identity.wrapper_counter &&
                                 its.wrapper_version == identity.wrapper_version;
    const bool is_unchanged = is_same_wrapper || (is_same_tensor && identity.wrapper_version == 0);
    return its.storage == identity.storage && its.data == identity.data && its.nbytes == identity.nbytes &&
           (is_unchanged || known.state == RecordState::Resident) && known.span.begin <= span.begin &&
           span.end <= known.span.end && (span.begin - known.span.begin) % itemsize == 0;
  }

  void check_found(const std::optional<RecordId>& found, TapeId tape, const Identity& identity, const Span& span,
                   uint64_t itemsize) const {
    const auto matches = [&](const auto& entry) {
      return entry.second.tape == tape && is_joinable(entry.second, identity, span, itemsize);
    };
    if (!found) {
      expect(std::none_of(holdings_.begin(), holdings_.end(), matches), "bytes that a record stands for move again");
      return;
    }
    const auto joined = holdings_.find(found->index);
    expect(joined != holdings_.end() && joined->second.id == *found, "a save joined a record that is gone");
    expect(matches(*joined), "a save joined a record of other bytes");
  }

  void add_record(RecordId id, TapeId tape, const Identity& identity, const Span& span) {
    expect(!holdings_.contains(id.index), "an index was given twice");
    holdings_[id.index] = {id, tape, identity, span, RecordState::Resident, false, false, std::nullopt, {}};
  }

  void add_handle(RecordId id, uint64_t save, bool is_new) {
    const Holding& joined = holding(id);
    auto& [saves, bytes] = tapes_[{joined.tape.index, joined.tape.generation}];
    expect(save == saves++, "a save's number is not the next");
    handles.push_back({id, save, bytes});
    if (is_new) bytes += joined.span.nbytes();
  }

  // Every handle may have the bytes once more.
  void reloaded(RecordId id) {
    for (Handle& handle : handles) {
      if (handle.record == id) handle.was_given = false;
    }
    was_reloaded_[id.index] = true;
  }
  bool was_reloaded(RecordId id) { return was_reloaded_[id.index]; }

  // Takes a record out that its last handle left.
  Holding remove(RecordId id) {
    was_reloaded_.erase(id.index);
    return std::move(holdings_.extract(id.index).mapped());
  }

  void check(Ledger& ledger) const {
    ledger.check_invariants();
    struct Count {
      uint32_t live = 0, unseen = 0;
    };
    std::map<uint32_t, Count> counts;
    for (const Handle& handle : handles) {
      Count& count = counts[handle.record.index];
      ++count.live;
      if (!handle.was_given) ++count.unseen;
      const Save& save = ledger.tape(holdings_.at(handle.record.index).tape).save(handle.save);
      expect(save.record == handle.record, "a save is not where its number says");
      expect(save.bytes_before == handle.bytes_before, "a save stands at other bytes of its tape");
    }
    expect(ledger.live_handles() == handles.size(), "handles were lost or made up");
    expect(ledger.live_records() == holdings_.size(), "records were lost or made up");
    for (const auto& [index, holding] : holdings_) {
      const Record& record = ledger.record(holding.id);
      const Count& count = counts[index];
      expect(record.live_handles == count.live && record.unseen == count.unseen, "a record's counts are off");
      expect(ledger.all_seen(holding.id) == (count.unseen == 0), "all handles have the bytes, or the reverse");
      expect(record.state == holding.state, "a record is in another state");
      expect(record.is_kept() == holding.is_kept, "a record is kept, or the reverse");
      expect(record.prefetched == holding.is_prefetched, "a record was reloaded ahead, or the reverse");
      expect(record.has_slot == holding.slot.has_value(), "the ledger knows of another slot");
      expect(record.span == holding.span && record.tape == holding.tape, "a record's span or tape has changed");
    }
  }

 private:
  struct TapeSoFar {
    uint64_t saves = 0, bytes = 0;
  };
  std::map<uint32_t, Holding> holdings_;  // by record index
  std::map<uint32_t, bool> was_reloaded_;
  std::map<std::pair<uint32_t, uint32_t>, TapeSoFar> tapes_;
};

}  // namespace torchoffload::fuzz
