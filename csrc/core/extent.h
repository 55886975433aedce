// Extent: the part of a storage that moves with a save.
// Ownership:     none; the functions depend on their arguments alone.
// Thread safety: every function, any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "core/ledger.h"

namespace torchoffload {

// The bytes that move with a save: the span of the storage that the saved tensor reaches, or the whole storage.
enum class Extent : uint8_t { Span, Storage };

// The bytes that move when the first save of a storage reaches `span`: the whole storage when the span is at least half
// of it, else the span alone.
Span span_to_move(const Span& span, uint64_t storage_bytes);

// Note [Small views]
// A kept view pins its whole storage. So the size of the storage, and not that of the view, is compared with the
// minimum: a view of a few bytes moves alone if its storage is large enough. If the tape keeps that storage anyway,
// moving a view would free nothing, and the view is kept. If a tape saves many small views of one storage, the first
// few move alone, and then one copy of the whole storage serves all the others. So of a storage that lives on
// elsewhere, such as a table of positions, at most its own bytes and those few views move in vain. From the third tape
// on such a storage is known, and is kept.
inline constexpr uint32_t kSmallViewsAlone = 8;

// The extent that moves for a view that is smaller than the minimum and that no record stands for; nullopt: the view is
// kept.
std::optional<Extent> extent_of_small_view(const Ledger::OfStorage& known);

}  // namespace torchoffload
