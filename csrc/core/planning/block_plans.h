// BlockPlans: computes whether a plan for a step of blocks fits into a memory, and its simulated time.
// Ownership:     holds a reference to the step, which does not change meanwhile.
// Thread safety: const methods only.
// Failures:      std::invalid_argument for the number of a kind or an output that does not exist, and a kind without
//                a way.
// Not handled:   which plans are worth looking at; see joint_plan.h, which also defines the bytes and the times.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/planning/joint_plan.h"

namespace torchoffload {

// The bytes that a way keeps.
uint64_t kept_bytes(const BlockKind& kind, const BlockWay& way);

class BlockPlans {
 public:
  explicit BlockPlans(const StepOfBlocks& step);

  // The outputs that a new plan keeps on the device. LeavingRoom: room for whole windows at each moment.
  enum class Keeps : uint8_t { Nothing, LeavingRoom, AllThatFits };

  // The plan in which each call goes this way. The values kept from forward stay on the device as far as there is room,
  // from the last call to the first, and move otherwise. Without a window nothing moves. nullopt: the plan does not
  // fit. The plan has no times yet.
  std::optional<JointPlan> placed(const std::vector<uint32_t>& ways, uint64_t memory_bytes,
                                  std::optional<uint64_t> window_bytes, Keeps keeps) const;

  // Sums up the bytes of a plan, and gives each call its windows. Returns whether it fits.
  bool sum_up(JointPlan& plan, uint64_t memory_bytes) const;

  // Adds the times of a plan, by a simulation of its copies. Returns false if it is certain that the step takes longer
  // than `most_s`: the plan then has no times.
  bool time(JointPlan& plan, double most_s = std::numeric_limits<double>::infinity()) const;

  // A time that no plan beats in which the calls go these ways, whatever moves.
  double least_s(const std::vector<uint32_t>& ways, uint64_t memory_bytes) const;

  // A plan for one call in a way, in which something moves. The outputs that are made last stay, as many as are not in
  // `moved_count`. nullopt: nothing would move.
  std::optional<CallPlan> moving(size_t call, uint32_t way, size_t moved_count) const;

  const BlockKind& kind_of(size_t call) const { return step_.kinds[step_.calls[call].kind]; }
  // The sizes of the records that move under a plan, each once, in ascending order.
  std::vector<uint64_t> moving_sizes(const JointPlan& plan) const;
  // The sizes of the records that may move in these ways, likewise.
  std::vector<uint64_t> movable_sizes(const std::vector<uint32_t>& ways) const;

 private:
  // The bytes that a way keeps.
  struct Kept {
    uint64_t nbytes = 0;
    uint64_t unmovable_bytes = 0;   // of them, those that stay in any plan
    std::vector<uint32_t> movable;  // the outputs that may move, the ones that are made last first
    bool moves_input = false;
  };
  struct Copies;
  Kept kept_in(uint32_t kind, const BlockWay& way) const;
  const Kept& kept(size_t call, uint32_t way) const { return kept_[step_.calls[call].kind][way]; }
  const std::vector<uint64_t>& output_bytes(size_t call) const { return output_bytes_[step_.calls[call].kind]; }
  Copies copies_of(const JointPlan& plan) const;
  // Sets the windows of a plan. `before` and `moved`: the bytes that the calls before each one keep and move, and at
  // the end those of all. Returns whether the plan fits.
  bool set_windows(JointPlan& plan, const std::vector<uint64_t>& before, const std::vector<uint64_t>& moved,
                   uint64_t memory_bytes) const;
  // Decides which outputs of a call move, within a room. Returns the bytes that stay.
  uint64_t place_call(size_t call, uint32_t way, bool may_move, Keeps keeps, int64_t room, CallPlan& placed) const;
  uint64_t kept_of(size_t call, const CallPlan& placed) const;
  // Adds the sizes of the records that a call moves.
  void add_sizes(size_t call, const CallPlan& placed, std::vector<uint64_t>& sizes) const;
  // The bytes that the records which a call moves send over the link, in either direction.
  double link_bytes(size_t call, const CallPlan& placed) const;
  // A time that the step takes at least under a plan.
  double least_s(const JointPlan& plan) const;

  const StepOfBlocks& step_;
  std::vector<std::vector<Kept>> kept_;              // by kind and way
  std::vector<std::vector<uint64_t>> output_bytes_;  // by kind and output
  double forward_s_ = 0, backward_s_ = 0;            // until the loss and behind it, with nothing computed again
  double between_asks_s_ = 0;  // the most by which asks come earlier than backward goes on, since no two are at once
};

}  // namespace torchoffload
