// SpillingStores: which contexts of one kind of device share a TieredStore: those with the same directories, the same
// limit of memory and the same arena.
// Ownership:     the stores live for the process and are leaked on purpose: slots refer to them.
// Thread safety: needs the GIL.
// Failures:      of() throws std::runtime_error where no spill file can be made in a directory.
// Shutdown:      see Note [No CUDA after main].
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "storage/tiered_store.h"

namespace torchoffload {

// Where slots go on to, and when.
struct SpillPlan {
  std::vector<std::string> directories;
  SpillPolicy policy;
};

// With a tier that is the disk, this much host memory at most passes the bytes on.
inline constexpr uint64_t kPassingBytes = uint64_t{1} << 30;

class SpillingStores {
 public:
  explicit SpillingStores(SpillHooks hooks) : hooks_(std::move(hooks)) {}

  // A forked child has stores of its own; see Note [Forked children].
  TieredStore& of(PinnedArena& arena, const SpillPlan& plan);

 private:
  struct Known {
    PinnedArena* arena;
    SpillPlan plan;
    uint64_t generation;
    TieredStore* store;
  };

  const SpillHooks hooks_;
  std::vector<Known> known_;
};

}  // namespace torchoffload
