#include "core/planning/coding_trial.h"

namespace torchoffload {

namespace {

constexpr uint32_t kReadings = 2;        // of each way
constexpr uint32_t kMostTimedTapes = 8;  // a program whose tapes cannot be timed is not asked for ever

}  // namespace

void CodingTrial::saw_times(ShapeReadings& shape, TapeCode code, double step_s) {
  if (code == TapeCode::None) ++raw_readings_;
  if (code == TapeCode::First || step_s <= 0 || verdict_) return;
  (code == TapeCode::None ? shape.raw : shape.coded).add(step_s);
  if (shape.coded.count < kReadings || shape.raw.count == 0) return;
  so_far_ = CodingVerdict{shape.raw.least_s, shape.coded.least_s};
  if (code == TapeCode::None || !so_far_->is_for_the_code()) verdict_ = so_far_;
}

bool CodingTrial::is_spent() const { return timed_tapes_ >= kMostTimedTapes; }

bool CodingTrial::codes() const {
  if (!is_link_bound_) return false;
  if (verdict_) return verdict_->is_for_the_code();
  if (so_far_) return is_spent();
  return raw_readings_ >= kReadings || is_spent();
}

bool CodingTrial::takes_time_of_next(const ShapeReadings* shape) {
  if (!is_link_bound_ || verdict_ || is_spent()) return false;
  const bool is_coded_step_wanted =
      coded_tapes_ > 0 && shape != nullptr && shape->raw.count > 0 && shape->coded.count < kReadings;
  if (codes() && !is_coded_step_wanted) return false;
  ++timed_tapes_;
  return true;
}

}  // namespace torchoffload
