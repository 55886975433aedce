// Structure: the kinds of a tape's records in order, which tapes of different lengths have in common. From one such
// tape the sizes, times and windows of another are computed by scaling. So the steps of a model that sees another
// length each time (dynamic padding, packing, buckets) are known as well as those of one that always sees the same.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   sizes that grow otherwise than in proportion. If a record is not as large as expected, the rest of the
//                tape is scaled anew, a few times. After that a record may differ a little only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/planning/plan.h"

namespace torchoffload {

struct Structure {
  uint32_t number = 0;  // names the structure for ever
  uint32_t sightings = 0;
  uint64_t seen_at = 0;
  WindowOptions options;
  StepShape sample;  // the tape that was timed last, or the first one if none was timed
  std::optional<StepTimes> times;
  std::vector<bool> is_fixed;  // by record: it had the same bytes at each length. Empty: only one length was seen
  bool keeps_end = false;
  std::optional<uint64_t> window_bytes;  // Plan::window_bytes of the sample's plan

  // A tape of this structure was seen. Notes which of its records do not grow with the others.
  void saw(const std::vector<uint64_t>& nbytes);

  // The times of a tape with these bytes, scaled from the sample's; nullopt: none were measured.
  std::optional<StepTimes> times_for(const StepShape& shape) const;
};

// The sizes that are expected of a tape with a known structure and an unknown shape, and the plan for it.
class ScaledTape {
 public:
  // `seen`: the bytes of the tape's records so far, of which there is at least one.
  ScaledTape(Structure& structure, const std::vector<uint64_t>& seen, bool keeps_end);

  const Plan& plan() const { return plan_; }

  // Is the tape's record of this number as expected: of this kind, and exactly or else nearly of this size?
  bool matches(size_t record, uint64_t nbytes, const RecordKind& kind, bool is_exact) const;

 private:
  StepShape expected_;
  uint64_t largest_bytes_ = 0;
  Plan plan_;
};

}  // namespace torchoffload
