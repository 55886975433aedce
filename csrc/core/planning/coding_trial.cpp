#include "core/planning/coding_trial.h"

namespace torchoffload {

namespace {

constexpr uint32_t kReadings = 2;        // of each way
constexpr uint32_t kMostTimedTapes = 8;  // a program whose tapes cannot be timed is not asked for ever

}  // namespace

bool CodingTrial::saw_times(ShapeReadings& shape, TapeCode code, double step_s) {
  if (code == TapeCode::None) ++raw_readings_;
  if (code == TapeCode::First || step_s <= 0 || verdict_) return false;
  (code == TapeCode::None ? shape.raw : shape.coded).add(step_s);
  if (shape.coded.count < kReadings || shape.raw.count == 0) return false;
  verdict_ = CodingVerdict{shape.raw.least_s, shape.coded.least_s};
  return !verdict_->is_for_the_code();
}

bool CodingTrial::codes() const {
  if (!is_link_bound_) return false;
  if (verdict_) return verdict_->is_for_the_code();
  return raw_readings_ >= kReadings || timed_tapes_ >= kMostTimedTapes;
}

bool CodingTrial::takes_time_of_next(const ShapeReadings* shape) {
  if (!is_link_bound_ || verdict_ || timed_tapes_ >= kMostTimedTapes) return false;
  const bool is_coded_step_wanted =
      coded_tapes_ > 0 && shape != nullptr && shape->raw.count > 0 && shape->coded.count < kReadings;
  if (codes() && !is_coded_step_wanted) return false;
  ++timed_tapes_;
  return true;
}

}  // namespace torchoffload
