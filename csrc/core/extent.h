// Extent: what of a storage moves with a save.
// Ownership:     none; functions of what they are given.
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "core/ledger.h"

namespace torchoffload {

// What of a storage moves with a save: the span that it reaches, or all.
enum class Extent : uint8_t { Span, Storage };

// The bytes that move when the first save of a storage reaches `span`: the whole storage when the span is at least half
// of it, else the span alone.
Span span_to_move(const Span& span, uint64_t storage_bytes);

// Note [Small views]
// A kept view pins all of its storage, so what counts against the minimum is the storage: of one that is large enough a
// view of a few bytes moves alone. Where the tape keeps that storage anyway, moving a view would free nothing. And
// where it saves many small views of one storage, the first few move alone, and then one copy of all serves the rest,
// once: so of a storage that lives on elsewhere, such as a table of positions, never more moves for nothing than its
// own bytes and those few. From the third tape on such a storage is known, and stays.
inline constexpr uint32_t kSmallViewsAlone = 8;

// What moves for a view below the minimum that no record stands for; nullopt: nothing.
std::optional<Extent> extent_of_small_view(const Ledger::OfStorage& known);

}  // namespace torchoffload
