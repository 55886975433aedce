#include "core/extent.h"

namespace torchoffload {

Span span_to_move(const Span& span, uint64_t storage_bytes) {
  return 2 * span.nbytes() >= storage_bytes ? Span{0, storage_bytes} : span;
}

std::optional<Extent> extent_of_small_view(const Ledger::OfStorage& known) {
  if (known.is_kept) return std::nullopt;
  if (known.records < kSmallViewsAlone) return Extent::Span;
  return known.has_whole ? std::nullopt : std::optional(Extent::Storage);
}

}  // namespace torchoffload
