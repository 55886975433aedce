#include "core/planning/structure.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace torchoffload {

namespace {

// A record is nearly as large as expected if it differs by at most an eighth of its expected size, or by at most a 64th
// of the largest record.
constexpr uint64_t kShareOfItself = 8;
constexpr uint64_t kShareOfLargest = 64;

uint64_t scaled(uint64_t nbytes, double ratio) {
  return static_cast<uint64_t>(std::llround(static_cast<double>(nbytes) * ratio));
}

double total_bytes(const std::vector<uint64_t>& nbytes) {
  double sum = 0;
  for (const uint64_t each : nbytes) sum += static_cast<double>(each);
  return sum;
}

// The ratio of the latest record that grows to the sample's record of the same number.
double ratio_of(const Structure& structure, const std::vector<uint64_t>& seen) {
  for (size_t record = seen.size(); record-- > 0;) {
    const bool is_fixed = !structure.is_fixed.empty() && structure.is_fixed[record];
    if (is_fixed || structure.sample.nbytes[record] == 0) continue;
    return static_cast<double>(seen[record]) / static_cast<double>(structure.sample.nbytes[record]);
  }
  return 1;
}

StepShape expected_of(const Structure& structure, const std::vector<uint64_t>& seen) {
  StepShape expected = structure.sample;
  const double ratio = ratio_of(structure, seen);
  for (size_t record = 0; record < expected.count(); ++record) {
    uint64_t& nbytes = expected.nbytes[record];
    const bool is_fixed = !structure.is_fixed.empty() && structure.is_fixed[record];
    if (record < seen.size()) {
      nbytes = seen[record];
    } else if (!is_fixed) {
      nbytes = scaled(nbytes, ratio);
    }
  }
  return expected;
}

}  // namespace

void Structure::saw(const std::vector<uint64_t>& nbytes) {
  if (nbytes == sample.nbytes) return;
  if (is_fixed.empty()) is_fixed.assign(nbytes.size(), true);
  for (size_t record = 0; record < nbytes.size(); ++record) {
    if (nbytes[record] != sample.nbytes[record]) is_fixed[record] = false;
  }
}

std::optional<StepTimes> Structure::times_for(const StepShape& shape) const {
  if (!times) return std::nullopt;
  const double sample_bytes = total_bytes(sample.nbytes);
  const double ratio = sample_bytes > 0 ? total_bytes(shape.nbytes) / sample_bytes : 1;
  StepTimes scaled = *times;
  scaled.compute_s *= ratio;
  for (StepTimes::Record& record : scaled.records) {
    record.ready_s *= ratio;
    if (record.needed_s >= 0) record.needed_s *= ratio;
  }
  return scaled;
}

ScaledTape::ScaledTape(Structure& structure, const std::vector<uint64_t>& seen, bool keeps_end)
    : expected_(expected_of(structure, seen)), largest_bytes_(expected_.largest_bytes()) {
  // The window that keeps the link busy is searched for once, at the sample's length. It is scaled, since times and
  // bytes grow together.
  if (!structure.window_bytes) {
    const StepTimes* const times = structure.times ? &*structure.times : nullptr;
    structure.window_bytes = make_plan(structure.sample, times, structure.options, keeps_end).window_bytes;
  }
  const double ratio = total_bytes(expected_.nbytes) / std::max(1.0, total_bytes(structure.sample.nbytes));
  const std::optional<StepTimes> times = structure.times_for(expected_);
  const std::optional<uint64_t> window_bytes =
      times ? std::optional(scaled(*structure.window_bytes, ratio)) : std::nullopt;
  plan_ = make_plan(expected_, times ? &*times : nullptr, structure.options, keeps_end, window_bytes);
}

bool ScaledTape::matches(size_t record, uint64_t nbytes, const RecordKind& kind, bool is_exact) const {
  if (record >= expected_.count() || expected_.kinds[record] != kind) return false;
  const uint64_t expected_bytes = expected_.nbytes[record];
  if (is_exact) return nbytes == expected_bytes;
  const uint64_t difference = std::max(nbytes, expected_bytes) - std::min(nbytes, expected_bytes);
  return difference <= std::max(expected_bytes / kShareOfItself, largest_bytes_ / kShareOfLargest);
}

}  // namespace torchoffload
