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

#include "core/planning/coding_trial.h"
#include "core/planning/plan.h"

namespace torchoffload {

// The results of coding a record for the link.
struct CodingLesson {
  bool is_quicker = false;          // its step takes less time coded, as far as is known
  std::optional<float> exceptions;  // the share of its blocks when it was coded; nullopt: not known

  // With more of them the link would carry nearly as many bytes.
  bool has_too_many_exceptions() const { return exceptions && *exceptions >= 0.75F; }
};

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
  CodingTrial trial;
  std::vector<std::optional<float>> exceptions;  // by record, as in CodingLesson; empty: none is known

  CodingLesson coding(size_t record) const {
    return {trial.codes(), record < exceptions.size() ? exceptions[record] : std::nullopt};
  }

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

  uint32_t structure() const { return structure_; }
  const Plan& plan() const { return plan_; }

  // Is the tape's record of this number as expected: of this kind, and exactly or else nearly of this size?
  bool matches(size_t record, uint64_t nbytes, const RecordKind& kind, bool is_exact) const;

 private:
  uint32_t structure_;
  StepShape expected_;
  uint64_t largest_bytes_ = 0;
  Plan plan_;
};

}  // namespace torchoffload
