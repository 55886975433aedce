#include "storage/growth_plan.h"

#include <algorithm>

namespace torchoffload {
namespace {

// A slot of more chunks than this is rare (logits). It is not worth holding room ahead for it.
constexpr uint64_t kMostChunksOfASlot = 4;

constexpr uint64_t with_spare(uint64_t nbytes) { return nbytes + nbytes / 20; }

}  // namespace

void GrowthPlan::grow_on_need() {
  limit_bytes_.reset();
  wanted_bytes_ = 0;
}

void GrowthPlan::grow_ahead(uint64_t limit_bytes) {
  limit_bytes_ = limit_bytes / page_bytes_ * page_bytes_;
  wanted_bytes_ = 0;
}

void GrowthPlan::reserve(uint64_t capacity_bytes) {
  limit_bytes_ = round_up(std::min(capacity_bytes, kMostBytes), page_bytes_);
  wanted_bytes_ = *limit_bytes_;
}

void GrowthPlan::saw_slot(uint64_t nbytes, uint64_t capacity_bytes, uint64_t largest_free_bytes) {
  if (nbytes <= kMostChunksOfASlot * policy_.max_bytes) largest_slot_bytes_ = std::max(largest_slot_bytes_, nbytes);
  if (!limit_bytes_ || wanted_bytes_ > capacity_bytes) return;
  // The chunk before this one counts as well: chunks grow, and a smaller one that is still whole is room enough.
  const uint64_t next_bytes = chunk_bytes(capacity_bytes);
  if (largest_free_bytes >= std::min(next_bytes, last_chunk_bytes_)) return;
  wanted_bytes_ = std::min(*limit_bytes_, capacity_bytes + next_bytes);
}

void GrowthPlan::saw_chunk(uint64_t nbytes) {
  last_chunk_bytes_ = nbytes;
  if (nbytes >= refused_bytes_) refused_bytes_ = 0;
}

void GrowthPlan::saw_refusal(uint64_t nbytes) {
  refused_bytes_ = refused_bytes_ == 0 ? nbytes : std::min(refused_bytes_, nbytes);
}

void GrowthPlan::saw_chunks_given_back() {
  wanted_bytes_ = largest_slot_bytes_ = last_chunk_bytes_ = refused_bytes_ = shrunk_to_bytes_ = 0;
}

uint64_t GrowthPlan::bytes_on_need(uint64_t request_bytes, uint64_t capacity_bytes) const {
  uint64_t nbytes = within_limit(policy_.chunk_bytes(request_bytes, capacity_bytes, page_bytes_), capacity_bytes);
  if (was_refused(nbytes)) nbytes = 0;
  return std::max(nbytes, least_bytes(request_bytes));
}

uint64_t GrowthPlan::bytes_unlocked(uint64_t request_bytes, uint64_t capacity_bytes) const {
  const uint64_t nbytes = policy_.chunk_bytes(request_bytes, capacity_bytes, page_bytes_);
  return std::max(within_limit(nbytes, capacity_bytes), least_bytes(request_bytes));
}

uint64_t GrowthPlan::within_limit(uint64_t nbytes, uint64_t capacity_bytes) const {
  return limit_bytes_ ? std::min(nbytes, *limit_bytes_ - std::min(capacity_bytes, *limit_bytes_)) : nbytes;
}

uint64_t GrowthPlan::least_bytes(uint64_t request_bytes) const {
  return round_up(std::max<uint64_t>(request_bytes, 1), page_bytes_);
}

uint64_t GrowthPlan::bytes_ahead(uint64_t capacity_bytes) const {
  if (wanted_bytes_ <= capacity_bytes) return 0;
  const uint64_t nbytes = std::min(chunk_bytes(wanted_bytes_), wanted_bytes_ - capacity_bytes);
  return was_refused(nbytes) ? 0 : nbytes;
}

bool GrowthPlan::should_shrink(uint64_t needed_bytes, uint64_t capacity_bytes) const {
  if (needed_bytes >= capacity_bytes) return false;
  const bool is_done = shrunk_to_bytes_ > 0 && needed_bytes <= with_spare(shrunk_to_bytes_) &&
                       shrunk_to_bytes_ <= with_spare(needed_bytes);
  return !is_done && capacity_bytes > most_bytes(needed_bytes);
}

void GrowthPlan::saw_shrink(uint64_t needed_bytes, uint64_t capacity_bytes) {
  if (capacity_bytes <= most_bytes(needed_bytes)) shrunk_to_bytes_ = needed_bytes;
}

uint64_t GrowthPlan::most_bytes(uint64_t needed_bytes) const {
  return std::max(with_spare(needed_bytes), round_up(needed_bytes, page_bytes_));
}

uint64_t GrowthPlan::chunk_bytes(uint64_t capacity_bytes) const {
  return policy_.chunk_bytes(largest_slot_bytes_, capacity_bytes, page_bytes_);
}

}  // namespace torchoffload
