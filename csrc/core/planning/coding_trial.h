// CodingTrial: decides by timed steps whether a structure's steps take less time if bytes are coded for the link.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   steps of ever new lengths, and tapes that are alive beside others: no two such steps can be compared,
//                so they are coded if the link binds them.
//
// Note [A trial of the code]
// Even if the link binds a step, fewer bytes on the link do not always make the step quicker: the kernels that code
// need processors, and the program's kernels may leave them none for a long time. So both ways are timed, by tapes of
// one shape. The link may be found to bind in an early step, when little was learned yet. So one more step is timed as
// it is, and then the steps are coded. The first coded step is not timed, since it may begin with an allocation; two of
// the next ones are. If the code is quicker by then, one more step is timed as it is, since the program may have become
// quicker by itself meanwhile. Of each way the shortest step counts, so that no single slow step decides. The code is
// kept if it saves a hundredth of the time or more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace torchoffload {

// How a tape's records crossed the link.
enum class TapeCode : uint8_t {
  None,   // as they are, all of them
  First,  // the first tape of its structure of which something was coded
  Again,  // a later one
};

// The times of the timed steps of one shape.
struct StepReadings {
  uint32_t count = 0;
  double least_s = 0;

  void add(double step_s) { least_s = count++ == 0 ? step_s : std::min(least_s, step_s); }
};

// Those of both ways.
struct ShapeReadings {
  StepReadings raw, coded;
};

struct CodingVerdict {
  double raw_s = 0;
  double coded_s = 0;

  bool is_for_the_code() const { return coded_s <= 0.99 * raw_s; }
};

class CodingTrial {
 public:
  // ---- observations ----

  // A step takes longer than its compute. This is remembered for good, since a later step may be quicker only because
  // it was coded.
  void saw_link_bind() { is_link_bound_ = true; }
  // A tape was closed.
  void saw_tape(TapeCode code) { coded_tapes_ += code == TapeCode::None ? 0 : 1; }
  // A tape was timed. `step_s`: the time of its step; 0 if that cannot be compared. It is added to `shape`, the
  // readings of the tape's shape.
  void saw_times(ShapeReadings& shape, TapeCode code, double step_s);

  // ---- decisions ----

  // Are the next tapes to be coded?
  bool codes() const;
  // Are they, or may a trial that has no verdict yet still code later tapes?
  bool expects_code() const { return codes() || (so_far_ && !verdict_); }
  TapeCode code_of_next() const { return coded_tapes_ == 0 ? TapeCode::First : TapeCode::Again; }
  // Is the next tape to be timed for the trial? `shape`: the readings of the known shape that it follows, or null. If
  // it answers yes, this tape counts among the few that it asks for.
  bool takes_time_of_next(const ShapeReadings* shape);
  const std::optional<CodingVerdict>& verdict() const { return verdict_; }

 private:
  bool is_spent() const;  // no more tapes are timed for the trial

  bool is_link_bound_ = false;
  uint32_t raw_readings_ = 0;  // of tapes of any shape
  uint32_t coded_tapes_ = 0;
  uint32_t timed_tapes_ = 0;             // for the trial alone
  std::optional<CodingVerdict> so_far_;  // for the code, until a last step that is not coded was timed
  std::optional<CodingVerdict> verdict_;
};

}  // namespace torchoffload
