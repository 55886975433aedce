// Structure: what tapes of different lengths have in common (the kinds of their records, in order), and what one of
// them says of another: sizes, times and windows scale. So a model that sees another length in each step (dynamic
// padding, packing, buckets) is known as well as one that always sees the same.
// Ownership:     values only.
// Thread safety: none; touched only with the GIL held.
// Not handled:   sizes that grow otherwise than in proportion. A tape whose records are not as large as expected is
//                expected anew from there on, a few times; after that it goes on while each is nearly as large.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/planning/plan.h"

namespace torchoffload {

struct Structure {
  uint32_t number = 0;  // names it for good
  uint32_t sightings = 0;
  uint64_t seen_at = 0;
  WindowOptions options;
  StepShape sample;  // the tape that was timed last, or seen first
  std::optional<StepTimes> times;
  std::vector<bool> is_fixed;  // by record: it had the same bytes at another length. Empty: only one length was seen
  bool keeps_end = false;
  std::optional<uint64_t> window_bytes;  // of the sample's plan

  // A tape of this structure was seen: which of its records do not grow with the others?
  void saw(const std::vector<uint64_t>& nbytes);

  // Times of a tape with these bytes, by the sample's; nullopt: none were measured.
  std::optional<StepTimes> times_for(const StepShape& shape) const;
};

// What is expected of a tape whose bytes are new, and what of it is kept.
class ScaledTape {
 public:
  // `seen`: the bytes of its records so far, at least one.
  ScaledTape(Structure& structure, const std::vector<uint64_t>& seen, bool keeps_end);

  uint32_t structure() const { return structure_; }
  const Plan& plan() const { return plan_; }

  // Is the tape's record of this number what was expected: of this kind, and exactly, or nearly, of these bytes?
  bool fits(size_t record, uint64_t nbytes, const RecordKind& kind, bool is_exact) const;

 private:
  uint32_t structure_;
  StepShape expected_;
  uint64_t largest_bytes_ = 0;
  Plan plan_;
};

}  // namespace torchoffload
