// Learner: learns from each step for the next one. It recognises tapes by their shapes (the bytes of their records, in
// order) and by their structures (the kinds of their records, in order). For each record of a tape that it recognises
// it says whether the record is to be kept.
// Ownership:     values only: at most kShapeLimit shapes with kRecordLimit records in all, and as many structures with
//                as many records. Those that were not seen for the longest time are forgotten first.
// Thread safety: none; touched only with the GIL held.
// Not handled:   the order of several tapes among each other; see TapeOrder.
//
// A shape is learned when its tape is closed. The second tape of a shape is timed, and from the third one on the tapes
// follow a plan made with these times. The fifth is timed once more, since a second step is not yet a usual one, and
// after that each 64th, since a device may become slower. Structures are timed in the same way. A tape follows a known
// shape if one matches. If none does, it follows a known structure, whose sizes and times are scaled. A tape that
// matches neither is unknown from that record on: its kept records stay kept, and its shape is learned as a new one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/planning/plan.h"
#include "core/planning/structure.h"

namespace torchoffload {

class Learner {
 public:
  static constexpr size_t kShapeLimit = 16;
  static constexpr size_t kRecordLimit = size_t{1} << 20;
  static constexpr uint32_t kExpectedLimit = 8;  // how often the expectation of a tape's sizes may be scaled anew

  // A tape with the records that it has so far.
  struct Trace {
    WindowOptions options;
    // Is its backward expected right behind it? nullopt: as at the shape's last sighting.
    std::optional<bool> keeps_end;
    std::vector<uint64_t> nbytes;
    std::vector<RecordKind> kinds;
    uint32_t candidates = 0;                   // known shapes that match the tape so far: one bit for each
    uint64_t known_since = 0;                  // the value of changes_ that the bits refer to
    std::shared_ptr<const ScaledTape> scaled;  // the tape follows it if no known shape matches
    uint32_t expected_count = 0;               // how often the expectation was scaled
    bool is_long = false;                      // the tape has too many records to be learned
    bool is_timed = false;                     // the tape's times are wanted

    bool is_known() const { return candidates != 0 || scaled != nullptr; }
  };

  Trace begin(const WindowOptions& options, std::optional<bool> keeps_end = std::nullopt) const;

  // Tells of the tape's next record. Returns why it is to be kept, or None.
  Reason next(Trace& trace, uint64_t nbytes, RecordKind kind = {});

  // The windows from the latest record on, by the shape or structure that the tape follows; nullopt: it follows none.
  std::optional<WindowBytes> windows(const Trace& trace) const;

  // The tape is closed. `last_save` is as in StepShape, with one number for each record of the tape. Returns the number
  // of the tape's shape. nullopt: it is not learned, because it is too long, is empty, or has another number of records
  // than next() was told of.
  std::optional<uint32_t> learn(const Trace& trace, std::vector<uint64_t> last_save);

  // The backward of a tape of this shape has begun. `is_next`: no other tape was packed in between. Does nothing for a
  // shape that was forgotten.
  void backward_began(uint32_t shape, bool is_next);

  // The times of a timed tape of this shape. Does nothing for a shape that was forgotten.
  void learn_times(uint32_t shape, const StepTimes& times);

  size_t shape_count() const { return shapes_.size(); }
  size_t structure_count() const { return structures_.size(); }
  const Plan* plan_of(uint32_t shape);  // the plan for the shape's latest tape; null: the shape was forgotten
  void plan_as(const Plan& plan);       // for tests: shapes with as many records follow this plan, until they are timed

 private:
  struct Shape {
    uint32_t number = 0;  // names the shape for ever; its place in shapes_ may be given to another one
    uint32_t structure = 0;
    uint32_t sightings = 0;
    uint64_t seen_at = 0;
    WindowOptions options;
    StepShape records;
    std::optional<StepTimes> times;
    bool keeps_end = false;
    std::array<std::optional<Plan>, 2> plans;  // without keeping the tape's end, and with it; made at first use
  };
  Shape* find(uint32_t number);
  Structure* find_structure(uint32_t number);
  // Of these shapes the one that was seen last; null if there is none.
  const Shape* latest(uint32_t candidates) const;
  // Of the structures that match the tape so far the one that was seen last; null if there is none.
  Structure* latest_structure(const Trace& trace);
  // The shapes that match the tape so far and were learned under the same options, as bits.
  uint32_t all_like(const Trace& trace) const;
  // The known shape that the tape matches, its latest record included; null if there is none.
  Shape* follow_shape(Trace& trace);
  // Why the tape's latest record is to be kept by a known structure, or None. Looks for a structure if the tape follows
  // none, and scales it anew if a record is not as large as expected.
  Reason follow_structure(Trace& trace);
  // Notes the tape for its structure, which is made if it is new. Returns the structure's number.
  uint32_t learn_structure(const Trace& trace, const std::vector<uint64_t>& last_save);
  // The shape's plan, which is made at first use.
  const Plan& plan(Shape& shape, bool keeps_end);

  std::vector<Shape> shapes_;
  std::vector<Structure> structures_;
  uint64_t clock_ = 0;    // counts the tapes that were learned
  uint64_t changes_ = 0;  // counts the changes of the set of shapes
  uint32_t next_number_ = 0;
};

}  // namespace torchoffload
