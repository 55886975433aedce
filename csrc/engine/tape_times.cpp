#include "engine/tape_times.h"

#include <algorithm>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint64_t kTimedTapeLife = 64;  // timing stops once so many later tapes were opened
constexpr double kLatencyS = 20e-6;      // of a copy, whatever its size
// The link's rate is measured with copies of at least this size, or of the largest in that direction.
constexpr uint64_t kTellingBytes = uint64_t{4} << 20;

bool is_copy(const Timeline::Entry& entry) {
  return entry.kind == EntryKind::CopyOut || entry.kind == EntryKind::CopyIn;
}

bool is_stall(const Timeline::Entry& entry) {
  return entry.kind == EntryKind::WindowWait || entry.kind == EntryKind::ReloadWait ||
         entry.kind == EntryKind::DropWait;
}

// The bytes and the time of several copies in one direction.
struct Rate {
  uint64_t largest_bytes = 0;  // the size of the largest copy
  double bytes = 0;
  double seconds = 0;

  void add(const Timeline::Entry& copy) {
    if (copy.nbytes < std::min(kTellingBytes, largest_bytes)) return;
    bytes += static_cast<double>(copy.nbytes);
    seconds += copy.end_s - copy.begin_s;
  }
  double bytes_per_s_or(double before) const { return seconds > 0 ? bytes / seconds : before; }
};

}  // namespace

std::vector<TapeTimes::Timed>::iterator TapeTimes::find(uint64_t number) {
  return std::ranges::find(timed_, number, &Timed::number);
}

void TapeTimes::opened(uint64_t number) {
  const auto is_old = [&](const Timed& tape) { return tape.number + kTimedTapeLife < number; };
  for (size_t dropped = std::erase_if(timed_, is_old); dropped > 0; --dropped) stop_timing();
}

void TapeTimes::next(uint64_t number, bool is_first, bool wants_times) {
  if (is_first && wants_times && streams_.tells_time()) {
    timed_.push_back({number});
    timeline_.start();
    timed_.back().first_entry = timeline_.entry_count();
  } else if (!wants_times && !timed_.empty()) {
    if (const auto tape = find(number); tape != timed_.end()) {
      timed_.erase(tape);
      stop_timing();
    }
  }
}

void TapeTimes::stop_timing() {
  timeline_.stop();
  if (!timeline_.is_on()) return;
  uint64_t wanted = timeline_.entry_count();
  for (const Timed& known : timed_) wanted = std::min(wanted, known.first_entry);
  for (const Gone& known : gone_) wanted = std::min(wanted, known.first_entry);
  timeline_.forget_before(wanted);
}

void TapeTimes::gone(uint64_t number, std::optional<uint32_t> shape, size_t record_count) {
  const auto tape = find(number);
  if (tape == timed_.end()) return;
  const uint64_t first_entry = tape->first_entry;
  timed_.erase(tape);
  if (!shape) return stop_timing();
  gone_.push_back({*shape, number, record_count, first_entry, timeline_.entry_count()});
}

std::optional<TapeTimes::Taken> TapeTimes::take() {
  if (gone_.empty() || streams_.is_capturing()) return std::nullopt;
  if (gone_.front().end_entry > timeline_.read()) return std::nullopt;
  const Gone& tape = gone_.front();
  Taken taken{tape.shape, times_of(tape)};
  gone_.pop_front();
  stop_timing();
  return taken;
}

StepTimes TapeTimes::times_of(const Gone& tape) {
  StepTimes times;
  times.records.resize(tape.record_count);
  Rate out, in;
  double stalled_s = 0;
  std::optional<double> began_s;
  for (uint64_t number = tape.first_entry; number < tape.end_entry; ++number) {
    const Timeline::Entry& entry = timeline_.entry(number);
    Rate& rate = entry.kind == EntryKind::CopyOut ? out : in;
    if (is_copy(entry)) rate.largest_bytes = std::max(rate.largest_bytes, entry.nbytes);
  }
  for (uint64_t number = tape.first_entry; number < tape.end_entry; ++number) {
    const Timeline::Entry& entry = timeline_.entry(number);
    if (is_stall(entry)) {
      stalled_s += entry.end_s - entry.begin_s;
    } else if (is_copy(entry)) {
      (entry.kind == EntryKind::CopyOut ? out : in).add(entry);
    } else if (entry.tape == tape.number) {
      const double pure_s = entry.begin_s - stalled_s;
      if (!began_s) began_s = pure_s;
      StepTimes::Record& record = times.records.at(entry.record);
      (entry.kind == EntryKind::Ready ? record.ready_s : record.needed_s) = pure_s - *began_s;
      times.compute_s = std::max(times.compute_s, pure_s - *began_s);
    }
  }
  link_.out_bytes_per_s = out.bytes_per_s_or(link_.out_bytes_per_s);
  link_.in_bytes_per_s = in.bytes_per_s_or(link_.in_bytes_per_s);
  // If nothing was copied one way yet, the other way's rate is the best guess.
  if (link_.out_bytes_per_s == 0) link_.out_bytes_per_s = link_.in_bytes_per_s;
  if (link_.in_bytes_per_s == 0) link_.in_bytes_per_s = link_.out_bytes_per_s;
  link_.latency_s = kLatencyS;
  times.link = link_;
  return times;
}

}  // namespace torchoffload
