// Learner: what one step teaches the next. It knows tapes by their shapes, the bytes of their records in order, and
// says of each record of a tape that goes as a known one whether it is to be kept. Ownership:     values only; at most
// kShapeLimit shapes, kRecordLimit records in all. The shape that was not seen for the
//                longest goes first.
// Thread safety: none; touched only with the GIL held.
// Not handled:   the order of several tapes among each other; see TapeOrder.
//
// A shape is learned when its tape is closed. Its second sighting is timed, and the third goes by a plan that knows the
// times; the fifth is timed once more, since a second step is not yet a usual one. A tape that goes another way than
// every known one is on its own from that record on: what was kept of it stays kept, and it is learned anew.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/plan.h"

namespace torchoffload {

class Learner {
 public:
  static constexpr size_t kShapeLimit = 16;
  static constexpr size_t kRecordLimit = size_t{1} << 20;

  // A tape as far as it has come.
  struct Trace {
    WindowOptions options;
    std::optional<bool>
        keeps_end;  // its backward is expected right behind it; nullopt: as at the shape's last sighting
    std::vector<uint64_t> nbytes;
    uint32_t candidates = 0;   // known shapes that went the same way so far, as bits
    uint64_t known_since = 0;  // the bits mean the shapes of then
    bool is_long = false;      // past the limit: not learned
    bool is_timed = false;     // its times are wanted
  };

  Trace begin(const WindowOptions& options, std::optional<bool> keeps_end = std::nullopt) const;

  // The next record of the tape; why it is to be kept, or None.
  KeptReason next(Trace& trace, uint64_t nbytes);

  // The windows of the shape that the tape goes as; nullopt: it goes as none.
  std::optional<Windows> windows(const Trace& trace) const;

  // The tape is closed. `last_save` as in StepShape, one for each record that the tape has. Returns the number of its
  // shape, or nullopt where it is not learned: too long, empty, or of another number of records than next() was told.
  std::optional<uint32_t> learn(const Trace& trace, std::vector<uint64_t> last_save);

  // Backward of a tape of this shape has begun. `is_next`: no other tape was packed in between. Learned numbers of
  // shapes that were forgotten since do nothing.
  void backward_began(uint32_t shape, bool is_next);

  // What a timed tape of this shape took.
  void learn_times(uint32_t shape, StepTimes times);

  size_t shape_count() const { return shapes_.size(); }
  const Plan* plan_of(uint32_t shape);  // as at its last sighting; null: forgotten

 private:
  struct Shape {
    uint32_t number = 0;  // names it for good, while its place is another's later
    uint32_t sightings = 0;
    uint64_t seen_at = 0;
    WindowOptions options;
    StepShape records;
    std::optional<StepTimes> times;
    bool keeps_end = false;
    std::array<std::optional<Plan>, 2> plans;  // without its end and with it; made when first gone by
  };
  Shape* find(uint32_t number);
  const Shape* latest(uint32_t candidates) const;
  uint32_t all_like(const Trace& trace) const;
  void make_room(size_t record_count);
  static const Plan& plan(Shape& shape, bool keeps_end);

  std::vector<Shape> shapes_;
  uint64_t clock_ = 0;    // counts sightings
  uint64_t changes_ = 0;  // of the set of shapes
  uint32_t next_number_ = 0;
  size_t record_count_ = 0;
};

}  // namespace torchoffload
