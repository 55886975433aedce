// Learner: what one step teaches the next. It knows tapes by their shapes, the bytes of their records in order, and by
// their structures, the kinds of their records in order. It says of each record of a tape that goes as a known one
// whether it is to be kept.
// Ownership:     values only; at most kShapeLimit shapes and as many structures, kRecordLimit records of shapes in all,
//                and of structures. The one that was not seen for the longest goes first.
// Thread safety: none; touched only with the GIL held.
// Not handled:   the order of several tapes among each other; see TapeOrder.
//
// A shape is learned when its tape is closed. Its second sighting is timed, and the third goes by a plan that knows the
// times; the fifth is timed once more, since a second step is not yet a usual one, and after that each 64th, since a
// device may become slower. Structures are timed likewise. A tape goes as a known shape where there is one, and where
// there is none as a known structure, with sizes and times that scale. One that goes as neither is on its own from that
// record on: what was kept of it stays kept, and it is learned anew.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/plan.h"
#include "core/structure.h"

namespace torchoffload {

class Learner {
 public:
  static constexpr size_t kShapeLimit = 16;
  static constexpr size_t kRecordLimit = size_t{1} << 20;
  static constexpr uint32_t kExpectedLimit = 8;  // how often a tape is expected anew

  // A tape as far as it has come.
  struct Trace {
    WindowOptions options;
    // Is its backward expected right behind it? nullopt: as at the shape's last sighting.
    std::optional<bool> keeps_end;
    std::vector<uint64_t> nbytes;
    std::vector<RecordKind> kinds;
    uint32_t candidates = 0;                   // known shapes that went the same way so far, as bits
    uint64_t known_since = 0;                  // the bits mean the shapes of then
    std::shared_ptr<const ScaledTape> scaled;  // where no known shape goes as it does
    uint32_t expected_count = 0;               // how often it was expected anew
    bool is_long = false;                      // past the limit: not learned
    bool is_timed = false;                     // its times are wanted

    bool is_known() const { return candidates != 0 || scaled != nullptr; }
  };

  Trace begin(const WindowOptions& options, std::optional<bool> keeps_end = std::nullopt) const;

  // The next record of the tape; why it is to be kept, or None.
  Reason next(Trace& trace, uint64_t nbytes, RecordKind kind = {});

  // The windows from the latest record on, of the shape or structure that the tape goes as; nullopt: it goes as none.
  std::optional<WindowBytes> windows(const Trace& trace) const;

  // The tape is closed. `last_save` as in StepShape, one for each record that the tape has. Returns the number of its
  // shape, or nullopt where it is not learned: too long, empty, or of another number of records than next() was told.
  std::optional<uint32_t> learn(const Trace& trace, std::vector<uint64_t> last_save);

  // Backward of a tape of this shape has begun. `is_next`: no other tape was packed in between. Learned numbers of
  // shapes that were forgotten since do nothing.
  void backward_began(uint32_t shape, bool is_next);

  // What a timed tape of this shape took.
  void learn_times(uint32_t shape, StepTimes times);

  size_t shape_count() const { return shapes_.size(); }
  size_t structure_count() const { return structures_.size(); }
  const Plan* plan_of(uint32_t shape);  // as at its last sighting; null: forgotten
  void plan_as(const Plan& plan);       // for tests: the shapes of as many records have it, until they are timed

 private:
  struct Shape {
    uint32_t number = 0;  // names it for good, while its place is another's later
    uint32_t structure = 0;
    uint32_t sightings = 0;
    uint64_t seen_at = 0;
    WindowOptions options;
    StepShape records;
    std::optional<StepTimes> times;
    bool keeps_end = false;
    std::array<std::optional<Plan>, 2> plans;  // without its end and with it; made when first gone by
  };
  Shape* find(uint32_t number);
  Structure* find_structure(uint32_t number);
  const Shape* latest(uint32_t candidates) const;
  Structure* latest_structure(const Trace& trace);
  uint32_t all_like(const Trace& trace) const;
  Shape* follow_shape(Trace& trace);
  Reason follow_structure(Trace& trace);
  uint32_t learn_structure(const Trace& trace, const std::vector<uint64_t>& last_save);
  const Plan& plan(Shape& shape, bool keeps_end);

  std::vector<Shape> shapes_;
  std::vector<Structure> structures_;
  uint64_t clock_ = 0;    // counts sightings
  uint64_t changes_ = 0;  // of the set of shapes
  uint32_t next_number_ = 0;
};

}  // namespace torchoffload
