// Frontier: which of a block's operators to keep and which to compute again in backward, for each number of bytes.
// Ownership:     values only.
// Thread safety: pure functions.
// Failures:      std::invalid_argument for the number of a group that does not exist, for more than kMostGroups groups,
//                and for more bytes than an address space has.
// Not handled:   the place of kept values: whether they stay on the device or move is decided over all blocks.
//
// Note [Cuts that price memory]
// A block is a graph of operator groups. Each group is kept, computed again, or neither. For a price p of a byte the
// best choice minimises
//     (seconds of the groups computed again) + p * (bytes of the groups kept),
// where each group that is computed again needs its inputs, kept or computed again, and each group that backward needs
// is one of the two. With two variables for each group, a (it is available) and r (it is computed again; r <= a), that
// is a minimum cut: each condition says that one variable is at most another one, and the cost is linear. Over all
// prices the best choices are the corners of the lower convex hull of (bytes, seconds). The search takes the slope
// between two corners as a price. The minimum at that price is either a corner below their line, or there is none
// between them. Bytes are counted in pages and times in nanoseconds, as integers, so that each process that is given
// the same numbers finds the same corners. If the product of all times and all pages would be too large for an integer,
// a power of two of nanoseconds is the unit. The larger a block is, the longer a cut takes. So the number of cuts is
// limited, such that its product with the block's size stays below a limit. The corners found by then are returned,
// which are enough to choose from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchoffload {

constexpr size_t kMostGroups = 4096;

// The operators that write to one storage made by the block. Mostly that is a single operator.
struct OperatorGroup {
  uint64_t duration_ns = 0;      // to compute it again
  uint64_t nbytes = 0;           // of its outputs
  std::vector<uint32_t> inputs;  // the groups that it reads
  bool may_keep = true;          // its outputs can be kept from forward
  bool may_recompute = true;     // false for a block's inputs, and for writes to memory outside of the block
  bool is_needed = false;        // backward needs its outputs
};

enum class Choice : uint8_t {
  Skipped,     // neither kept nor computed again: nothing needs it
  Kept,        // its outputs of forward are kept until the block's backward
  Recomputed,  // computed again in backward
};

// One corner of the hull.
struct BlockCorner {
  uint64_t kept_bytes = 0;
  uint64_t recompute_ns = 0;
  std::vector<Choice> choices;  // by group
};

// The corners, from the least bytes to the least time. Empty: the block cannot be computed again, because backward
// needs a group that can neither be kept nor be computed again. `draws`: the groups that draw random numbers, in the
// order of drawing; one may stand in it more than once. Each of them is kept or computed again, and those computed
// again are the first ones: only then has the generator, at each of them, the same state as in forward.
std::vector<BlockCorner> block_frontier(const std::vector<OperatorGroup>& groups, const std::vector<uint32_t>& draws);

}  // namespace torchoffload
