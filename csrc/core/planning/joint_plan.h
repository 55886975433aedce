// JointPlan: for each call of a block in a step, which values are kept, which move, and which are computed again.
// Ownership:     values only.
// Thread safety: pure functions.
// Failures:      std::invalid_argument for the number of a kind, a way or an output that does not exist, for a plan of
//                other calls than the step has, for times that are negative or not finite, for rates that are not above
//                0 if something may move, for shares of the link that are not in (0, 1], and for bytes whose sum
//                overflows.
// Not handled:   link and compute of other processes on the same host; blocks of one kind that take different times.
//
// Note [Memory of a step of blocks]
// The plan covers only the values that blocks keep. The rest of the device's memory is measured, in a step that keeps
// nothing in its blocks: the most while each block's forward runs, at the loss, and while each block's backward runs,
// with the block computed again. A plan adds the bytes that it keeps on the device until the block's backward has
// begun, and the windows. While a block's backward runs, the block's own values are there in any plan, so they are part
// of the measured memory. Windows of 0 bytes add nothing: the compute stream waits for each copy.
//
// Each call has windows of its own size. They have the plan's size if there is room for it, and otherwise take all the
// room there is: a language model takes the most memory at its loss, and has room for large windows before and behind
// it. As a call begins, and at the loss, the compute stream waits until no more is on its way out than the window of
// that moment has room for. The reload window of a call is in force from the moment on at which backward asks for the
// call's saved tensors. Records that were reloaded ahead stay until they are used. So this window needs room in the
// backwards that follow, too, as long as they still have records that could be ahead. In backward the offload window of
// the loss counts as well. Nothing waits for its copies in backward, however long ago they ended: a source in it is
// held until backward asks for it. Sources leave the window in the order of their copies, so that those of the last
// blocks are in it. While a block's backward runs, the sources of this block and of the blocks behind it have left the
// window, and the window holds sources of earlier blocks up to the rest of its size.
//
// PyTorch's allocator needs large pieces at the loss. If the blocks' values have cut the free memory up, it has to give
// memory back and map it anew, and the device waits for that. So in the end the windows of blocks are made as small as
// they can be while the step takes as long: they leave a part of the room that they could have.
//
// Note [The search for a plan]
// If nothing moves, the search goes through the calls, and for each amount of kept bytes it remembers the best way to
// reach it. If records may move, the search looks at the following plans. The ways of a kind are the corners of its
// hull of bytes and time. From one way to the next each further byte saves less time, and for one price of a byte each
// kind takes one way. So all kinds begin at their ways of least bytes. Then one kind after the other goes on to its
// next way, in the order of the time that a byte saves. Of a kind, the first or the last calls go on before the others.
// The values kept from forward stay on the device as far as there is room, from the last block to the first, and move
// otherwise. Three sorts of plans are tried: with room for whole windows left free everywhere, for windows of several
// sizes; without that room; and with all values moved that may move. Each such plan is simulated. The best plan of each
// sort is then changed, one call or the windows at a time, as long as that saves time, or bytes that move.
// Most of these plans are too slow, and it is enough to know that. So a bound comes first (BlockPlans::least_s), and a
// simulation ends as soon as its step is certain to take longer than the best one so far. Neither changes the result.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "core/planning/step.h"

namespace torchoffload {

// Something that a block may keep from its forward.
struct BlockOutput {
  std::vector<uint64_t> sizes;  // of its storages, in bytes: each is a record of its own
  double ready_s = 0;           // seconds from the start of the block's forward
  bool may_move = true;

  uint64_t nbytes() const { return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}); }
};

// One way to run a block.
struct BlockWay {
  double recompute_s = 0;
  std::vector<uint32_t> kept;  // outputs, by number
  uint64_t input_bytes = 0;    // kept of its arguments
  bool is_plain = false;       // nothing is computed again, and autograd saves as it does: all of it moves, or nothing
};

// Blocks that do the same.
struct BlockKind {
  double forward_s = 0;
  double backward_s = 0;  // without the values computed again
  std::vector<BlockOutput> outputs;
  std::vector<BlockWay> ways;  // the corners of a hull, from the least bytes to the least time
};

// One call of a block. The bytes are the most on the device while it runs; see Note [Memory of a step of blocks].
struct BlockCall {
  uint32_t kind = 0;
  uint64_t forward_bytes = 0;
  uint64_t backward_bytes = 0;
};

struct StepOfBlocks {
  std::vector<BlockKind> kinds;
  std::vector<BlockCall> calls;    // in the order of forward
  double head_s = 0;               // before the first block
  double loss_s = 0;               // between the last block's forward and its backward
  double end_s = 0;                // behind the backward of the first block
  uint64_t loss_bytes = 0;         // the most on the device in that time
  uint64_t least_moved_bytes = 0;  // smaller values do not move
  uint64_t tier_bytes = 0;         // the tier's room
  bool may_move = false;
  bool leaves_room = false;  // of plans that take nearly as long, the one that takes the least memory in its blocks
  LinkRates link;
};

struct CallPlan {
  uint32_t way = 0;
  std::vector<uint32_t> moved;  // outputs, by number
  bool moves = false;           // something moves, and if it is not plain its arguments, too

  friend bool operator==(const CallPlan&, const CallPlan&) = default;
};

// The windows of one call; see Note [Memory of a step of blocks].
struct CallWindows {
  uint64_t offload_bytes = 0;  // while its forward runs
  uint64_t reload_bytes = 0;   // while its backward runs
  uint64_t ahead_bytes = 0;    // of the reload window, the part that calls before it can have
};

struct JointPlan {
  std::vector<CallPlan> calls;
  std::vector<CallWindows> windows;  // by call
  uint64_t loss_window_bytes = 0;    // the offload window at the loss
  double step_s = 0;
  double recompute_s = 0;
  uint64_t peak_bytes = 0;
  uint64_t loss_bytes = 0;  // on the device at the loss: the blocks' kept values, and the window of that moment
  uint64_t kept_bytes = 0;  // of the blocks, on the device
  uint64_t moved_bytes = 0;
  uint64_t window_bytes = 0;  // the most that any window has
  uint64_t blocks_bytes = 0;  // the most on the device while a block runs
  // The room that the windows of blocks could have, but leave free.
  uint64_t forward_spare_bytes = 0;
  uint64_t backward_spare_bytes = 0;
};

// The factors by which the times of a step may differ from another's: of all computing, of computing again besides, and of
// the link's rates.
struct TimeFactors {
  double pace = 1;
  double again = 1;
  double rate = 1;
};
StepOfBlocks with_times(StepOfBlocks step, const TimeFactors& factors);

// The plan of the least time whose peak is at most `memory_bytes`; nullopt if there is none.
std::optional<JointPlan> plan_step(const StepOfBlocks& step, uint64_t memory_bytes);

// Sets the times of a plan that was made for another step, which has other times and the same bytes.
void time_plan(const StepOfBlocks& step, JointPlan& plan);

// The plan of the least memory: all calls go the way of the least bytes, and all values that can move do, with windows
// of this size. A survey runs its steps like that.
JointPlan least_plan(const StepOfBlocks& step, uint64_t window_bytes = 0);

}  // namespace torchoffload
