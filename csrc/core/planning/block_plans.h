// BlockPlans: computes whether a plan for a step of blocks fits into a memory, and its simulated time.
// Ownership:     holds a reference to the step.
// Thread safety: const methods only.
// Failures:      std::invalid_argument for the number of a kind or an output that does not exist, and a kind without
//                a way.
// Not handled:   which plans are worth looking at; see joint_plan.h, which also defines the bytes and the times.
#pragma once

#include <cstdint>
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

  // Adds the times of a plan, by a simulation of its copies.
  void time(JointPlan& plan) const;

  // A plan for one call in a way, in which something moves. The outputs that are made last stay, as many as are not in
  // `moved_count`. nullopt: nothing would move.
  std::optional<CallPlan> moving(size_t call, uint32_t way, size_t moved_count) const;

  const BlockKind& kind_of(size_t call) const { return step_.kinds[step_.calls[call].kind]; }
  // The sizes of the records that move under a plan, each once, in ascending order.
  std::vector<uint64_t> moving_sizes(const JointPlan& plan) const;
  // The sizes of the records that may move in these ways, likewise.
  std::vector<uint64_t> movable_sizes(const std::vector<uint32_t>& ways) const;

 private:
  struct Copies;
  Copies copies_of(const JointPlan& plan) const;
  // Sets the windows of a plan. `before` and `moved`: the bytes that the calls before each one keep and move, and at
  // the end those of all. Returns whether the plan fits.
  bool set_windows(JointPlan& plan, const std::vector<uint64_t>& before, const std::vector<uint64_t>& moved,
                   uint64_t memory_bytes) const;
  // The outputs that a way keeps and that may move, the ones that are made last first.
  std::vector<uint32_t> movable(const BlockKind& kind, const BlockWay& way) const;
  bool moves_input(const BlockWay& way) const;
  // The bytes of a call that stay in any plan.
  uint64_t unmovable_bytes(const BlockKind& kind, const BlockWay& way) const;
  // Decides which outputs of a call move, within a room. Returns the bytes that stay.
  uint64_t place_call(size_t call, uint32_t way, bool may_move, Keeps keeps, int64_t room, CallPlan& placed) const;
  uint64_t kept_of(size_t call, const CallPlan& placed) const;

  const StepOfBlocks& step_;
};

}  // namespace torchoffload
