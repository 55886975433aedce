// CopyWindows: counts the bytes on the device that are on their way out, reloaded ahead, or kept, and decides by these
// counts which copy out to wait for, which records to reload next, and which ones the consumer has passed by. The
// counts and the limits of one tape are in TapeWindows, which the caller keeps with the tape.
// Ownership:     ids and counts of bytes. CopyWindows asks its caller for the present state of a record.
// Thread safety: none; touched only with the GIL held.
// Invariants:    offload_bytes() is the sum over the records whose copies began and that have not left, and over those
//                whose copies wait for room in the store.
//                reload_bytes() is the sum over ahead().
//                A tape's place for reloads is never above the end of its saves.
// Not handled:   carrying anything out. CopyWindows is told of events, and answers questions about the next copies.
//
// The engine drives one CopyWindows for all tapes of its device, and simulate() in step.cpp drives another one for the
// single tape of a step that it goes through. So the plan and the engine follow the same decisions. docs/design.md
// lists the events that the two report to CopyWindows differently.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/types.h"

namespace torchoffload {

// How much of one tape may be on the device in each direction. Kept bytes count towards both.
struct WindowBytes {
  uint64_t offload_bytes = 0;
  uint64_t reload_bytes = 0;
};

// The place of a record's bytes, so far as it matters for reloading ahead.
enum class Rests : uint8_t {
  InSlot,    // they left the device: the record can be reloaded
  OnItsWay,  // they left the device, and are on a disk or on the way from there: a reload would have to wait
  AtSource,  // the record is to move and its source is still here, whether its copy was enqueued or not
  Neither,   // the record was kept, is on its way back or back already, or was released
};

// The record of a save.
struct SavedRecord {
  RecordId id;
  Rests rests = Rests::Neither;
  uint64_t nbytes = 0;
};

constexpr uint64_t kAnyBytes = std::numeric_limits<uint64_t>::max();

// Whether a search for reloads goes on or stops at a record whose source is still on the device.
enum class AtSource : uint8_t { GoesOn, Stops };

// One tape's windows, its kept bytes, and how far its reloads and its consumer have come. The consumer is the backward
// that asks for the tape's saves.
class TapeWindows {
 public:
  // The place of a consumer that may go on from any save: behind all of them, so that it has left none behind.
  static constexpr uint64_t kUnknownPlace = std::numeric_limits<uint64_t>::max();

  // No save is added any more. Reloads of the tape begin at its end and go towards its start.
  void close(uint64_t end_save) { reload_place_ = end_save_ = end_save; }

  void set_limits(WindowBytes limits) { limits_ = limits; }
  // A part of the tape begins with this save, which comes behind all that the tape has. The offload window holds from
  // now on, and the reload window while the consumer asks for saves of this part. A record that was reloaded before the
  // consumer came to the part, and is asked for only behind it, lies in that window, too.
  void begin_part(uint64_t save, WindowBytes limits) {
    limits_ = limits;
    if (!parts_.empty() && parts_.back().first_save == save) parts_.pop_back();
    parts_.push_back({save, limits.reload_bytes});
    for (const auto& [of, nbytes] : taken_) parts_.back().taken_before_bytes += of < save ? nbytes : 0;
  }
  const WindowBytes& limits() const { return limits_; }

  // Bytes of the tape stay on the device because of a learned reason, until they are released.
  void kept(uint64_t nbytes) { kept_bytes_ += nbytes; }
  void released(uint64_t nbytes) { kept_bytes_ -= nbytes; }
  uint64_t kept_bytes() const { return kept_bytes_; }

  // The search for reloads has looked at the saves from this number on.
  uint64_t reload_place() const { return reload_place_; }
  void reloads_came_to(uint64_t save) { reload_place_ = save; }

  // The consumer asks for `save`. Returns its place: the later of the last two saves that it asked for. A single ask
  // far ahead does not move the place, because a checkpoint asks for its input before it asks for the tensors saved
  // behind that input. So if a backward begins before the tape's end, its place is known from its second ask on.
  uint64_t consumer_asks(uint64_t save) {
    use_reload_bytes_at(save);
    const std::optional<uint64_t> before = std::exchange(asked_before_, save);
    if (!before) return save + 1 < end_save_ ? kUnknownPlace : save;
    const uint64_t place = std::max(save, *before);
    std::erase_if(taken_, [&](const auto& taken) {
      if (taken.first <= place) return false;
      each_part_behind(taken.first, [&](Part& part) { part.taken_before_bytes -= taken.second; });
      return true;
    });
    return place;
  }
  // The consumer, whose place is `place`, asked for a save whose record was not on its way. Reloads go on from there.
  void consumer_missed(uint64_t save, uint64_t place) {
    reload_place_ = save < reload_place_ ? std::min(reload_place_, place) : save;
  }
  // A graph task that asked for the tape has ended. The next one may begin at any save.
  void consumer_ended() {
    asked_before_.reset();
    taken_.clear();
    for (Part& part : parts_) part.taken_before_bytes = 0;
  }

  // If the windows change on the consumer's way to a save: may a record of so many bytes, which that save asks for, be
  // on the device by then? It would lie in the window of each part of the tape between here and there, beside the
  // records that were taken for saves behind that part.
  bool fits_on_the_way_to(uint64_t save, uint64_t nbytes) const {
    for (auto part = std::ranges::upper_bound(parts_, save, {}, &Part::first_save); part != parts_.end(); ++part) {
      if (asked_before_ && part->first_save > *asked_before_) break;
      if (nbytes + part->taken_before_bytes > part->reload_bytes) return false;
    }
    return true;
  }
  void took_for(uint64_t save, uint64_t nbytes) {
    if (parts_.empty()) return;
    taken_.emplace_back(save, nbytes);
    each_part_behind(save, [&](Part& part) { part.taken_before_bytes += nbytes; });
  }

 private:
  struct Part {
    uint64_t first_save = 0;
    uint64_t reload_bytes = 0;
    uint64_t taken_before_bytes = 0;  // of the records in taken_ that are asked for by saves before this part
  };

  void use_reload_bytes_at(uint64_t save) {
    const auto next = std::ranges::upper_bound(parts_, save, {}, &Part::first_save);
    if (next != parts_.begin()) limits_.reload_bytes = std::prev(next)->reload_bytes;
  }
  template <typename Change>
  void each_part_behind(uint64_t save, Change change) {
    for (auto part = parts_.rbegin(); part != parts_.rend() && part->first_save > save; ++part) change(*part);
  }

  WindowBytes limits_;
  uint64_t kept_bytes_ = 0;
  uint64_t reload_place_ = 0;
  uint64_t end_save_ = 0;
  std::optional<uint64_t> asked_before_;  // the save that a backward asked for last
  std::vector<Part> parts_;               // in the order of their saves; empty: the reload window never changes
  // If it changes: the records that were taken to be reloaded, by the save that asks for each, with their bytes, until
  // the consumer comes to that save. One whose bytes were dropped meanwhile counts on, so that less is reloaded ahead.
  std::vector<std::pair<uint64_t, uint64_t>> taken_;
};

// The bytes of all tapes.
class CopyWindows {
 public:
  // A record that is to be reloaded ahead of its consumer.
  struct Ahead {
    RecordId record;
    uint64_t expected_at = 0;  // the save that asks for it first
  };

  // ---- the offload window; `is_in_flight(id)`: was the record's copy enqueued, and is its source still held? ----

  // The record's copy out was enqueued.
  template <typename IsInFlight>
  void offload_began(RecordId id, uint64_t nbytes, IsInFlight is_in_flight) {
    if (in_flight_.size() >= prune_at_) {
      std::erase_if(in_flight_, [&](RecordId known) { return !is_in_flight(known); });
      prune_at_ = 2 * in_flight_.size() + kPruneAtLeast;
    }
    in_flight_.push_back(id);
    in_flight_bytes_ += nbytes;
  }
  // The record's source was dropped, was used by a backward, or is kept after all, or the record was released.
  void offload_left(uint64_t nbytes) { in_flight_bytes_ -= nbytes; }

  // The record's copy out waits for room in the store. Its source counts as that of a copy in flight does.
  void wait_began(uint64_t nbytes) { waiting_bytes_ += nbytes; }
  // Its copy is about to be enqueued after all, or never will be.
  void wait_ended(uint64_t nbytes) { waiting_bytes_ -= nbytes; }
  uint64_t waiting_bytes() const { return waiting_bytes_; }

  // Does this tape's window allow the waiting copies of all tapes to go on waiting, and one more of `coming_bytes` with
  // them? Copies in flight are not asked about: they are waited for if there is no room beside them.
  bool may_wait(const TapeWindows& tape, uint64_t coming_bytes) const {
    return waiting_bytes_ + coming_bytes + tape.kept_bytes() <= tape.limits().offload_bytes;
  }

  // On the way out, in flight or waiting.
  uint64_t offload_bytes() const { return in_flight_bytes_ + waiting_bytes_; }

  // The record whose copy out began first among those that have not left; nullopt: there is none.
  template <typename IsInFlight>
  std::optional<RecordId> oldest_offload(IsInFlight is_in_flight) {
    while (!in_flight_.empty() && !is_in_flight(in_flight_.front())) in_flight_.pop_front();
    return in_flight_.empty() ? std::nullopt : std::optional(in_flight_.front());
  }

  // The record whose copy out must be waited for now: the oldest one in flight, while the bytes on the way out of all
  // tapes and `kept_bytes` together exceed `window_bytes`. nullopt: none has to be.
  template <typename IsInFlight>
  std::optional<RecordId> offload_to_wait_for(uint64_t window_bytes, uint64_t kept_bytes, IsInFlight is_in_flight) {
    if (in_flight_bytes_ == 0 || offload_bytes() + kept_bytes <= window_bytes) return std::nullopt;
    return oldest_offload(is_in_flight);
  }

  // Calls `note(id)` for each record that will have to be waited for once `coming_bytes` more are in flight, oldest
  // first, for as long as `note` returns true.
  template <typename IsInFlight, typename BytesOf, typename Note>
  void each_offload_to_wait_for(uint64_t coming_bytes, uint64_t window_bytes, uint64_t kept_bytes,
                                IsInFlight is_in_flight, BytesOf bytes_of, Note note) const {
    uint64_t held_bytes = offload_bytes() + kept_bytes + coming_bytes;
    for (auto id = in_flight_.begin(); id != in_flight_.end() && held_bytes > window_bytes; ++id) {
      if (!is_in_flight(*id)) continue;
      if (!note(*id)) return;
      held_bytes -= bytes_of(*id);
    }
  }

  // ---- the reload window ----

  // Reloads ahead of so many bytes are about to be enqueued. They count from now on, since other threads may run
  // meanwhile.
  void reloads_start(uint64_t nbytes) { starting_bytes_ += nbytes; }
  // They were enqueued. reload_began() is called for each record that is on its way now.
  void reloads_started(uint64_t nbytes) { starting_bytes_ -= nbytes; }

  // The record's reload ahead of its consumer was enqueued.
  void reload_began(RecordId id, uint64_t nbytes);
  // The record was asked for, passed by, or released.
  void reload_left(RecordId id, uint64_t nbytes);
  // Records that were reloaded and not yet asked for, in the order in which their reloads began.
  const std::vector<RecordId>& ahead() const { return ahead_; }
  uint64_t reload_bytes() const { return reload_bytes_; }

  // The records to reload next for a tape, from the place that earlier calls reached towards the tape's start. The
  // search ends before the first record that is on its way from a disk, or does not fit in the tape's reload window any
  // more, beside the records that are reloaded and not yet asked for, those being started, those taken by this call,
  // and `kept_bytes`; or that would not fit in a window that the consumer comes to before it asks for the record. If
  // the consumer is in another tape, `most_bytes` is the smallest reload window of the tapes before this one.
  // `records` answers questions about the tape: `first_save()` is the number of its first save that is not forgotten,
  // and `at(save)` is the SavedRecord there.
  template <typename Records>
  std::vector<Ahead> take_reloads(TapeWindows& tape, uint64_t kept_bytes, AtSource at_source, const Records& records,
                                  uint64_t most_bytes = kAnyBytes) {
    std::vector<Ahead> taken;
    const auto is_taken = [&](RecordId id) {
      return std::any_of(taken.begin(), taken.end(), [&](const Ahead& ahead) { return ahead.record == id; });
    };
    const uint64_t window_bytes = std::min(tape.limits().reload_bytes, most_bytes);
    const uint64_t first_save = records.first_save();
    uint64_t held_bytes = reload_bytes_ + starting_bytes_ + kept_bytes;
    uint64_t place = tape.reload_place();
    for (; place > first_save; --place) {
      const SavedRecord saved = records.at(place - 1);
      if (saved.rests == Rests::OnItsWay) break;  // a later search goes on with it
      if (saved.rests == Rests::AtSource && at_source == AtSource::Stops) break;
      if (saved.rests != Rests::InSlot || is_taken(saved.id)) continue;
      if (held_bytes + saved.nbytes > window_bytes || !tape.fits_on_the_way_to(place - 1, saved.nbytes)) break;
      held_bytes += saved.nbytes;
      taken.push_back({saved.id, place - 1});
      tape.took_for(place - 1, saved.nbytes);
    }
    tape.reloads_came_to(place);
    return taken;
  }
  // Those of ahead() that the consumer at `save` has left behind by more bytes than the tape's reload window has.
  // `records` answers `bytes_behind(id, save)`: the bytes of the tape between the save and the later one that the
  // record was reloaded for; nullopt if the record was released, belongs to another tape, or is not passed yet.
  template <typename Records>
  std::vector<RecordId> passed_by(const TapeWindows& tape, uint64_t save, const Records& records) const {
    std::vector<RecordId> passed;
    for (const RecordId id : ahead_) {
      const std::optional<uint64_t> bytes_behind = records.bytes_behind(id, save);
      if (bytes_behind && *bytes_behind > tape.limits().reload_bytes) passed.push_back(id);
    }
    return passed;
  }

 private:
  static constexpr size_t kPruneAtLeast = 64;

  std::deque<RecordId> in_flight_;  // oldest first; records that have left are removed later
  size_t prune_at_ = kPruneAtLeast;
  uint64_t in_flight_bytes_ = 0;
  uint64_t waiting_bytes_ = 0;
  std::vector<RecordId> ahead_;
  uint64_t reload_bytes_ = 0;
  uint64_t starting_bytes_ = 0;
};

}  // namespace torchoffload
