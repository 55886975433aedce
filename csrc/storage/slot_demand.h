// SlotDemand: predicts how much memory slots are about to want, by the earlier rise and fall of their bytes.
// Ownership:     numbers.
// Thread safety: none: its owner's lock guards it.
//
// Note [Waves]
// The bytes of all slots, in memory and on disk, come in waves: forwards save tensors, and backwards use them. A wave
// begins with a slot that is acquired after the bytes have fallen to none, or by an eighth of their peak or of the
// memory's limit, whichever is more: slots that are dropped in the middle of a forward end none. Slots that stay, such
// as those of a graph that is kept, do not matter: the wave begins above them. A wave is expected to rise as far as the
// larger one of the two before it, since steps that differ often take turns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace torchoffload {

class SlotDemand {
 public:
  void acquired(uint64_t nbytes, uint64_t limit_bytes) {
    const uint64_t fall_bytes = std::max(peak_bytes_, limit_bytes) / kShareOfFall;
    const bool has_fallen = slot_bytes_ == 0 || peak_bytes_ - slot_bytes_ >= fall_bytes;
    if (peak_bytes_ > slot_bytes_ && has_fallen) {
      peak_before_last_ = last_peak_;
      last_peak_ = std::exchange(peak_bytes_, slot_bytes_);
      ++wave_count_;
    }
    slot_bytes_ += nbytes;
    peak_bytes_ = std::max(peak_bytes_, slot_bytes_);
  }
  void released(uint64_t nbytes) { slot_bytes_ -= nbytes; }

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint64_t wave_count() const { return wave_count_; }  // that have ended

  // The further bytes that slots are about to want. `ahead_bytes`: the bytes to reckon with if a wave rises higher than
  // expected.
  uint64_t coming_bytes(uint64_t ahead_bytes) const {
    const uint64_t expected_bytes = std::max(last_peak_, peak_before_last_);
    if (peak_bytes_ <= expected_bytes) return expected_bytes - slot_bytes_;
    return std::max(peak_bytes_ - slot_bytes_, ahead_bytes);
  }

  bool holds() const { return slot_bytes_ <= peak_bytes_; }  // the invariant

 private:
  static constexpr uint64_t kShareOfFall = 8;

  uint64_t slot_bytes_ = 0;  // of all slots
  uint64_t peak_bytes_ = 0;  // of this wave
  uint64_t last_peak_ = 0;   // of the wave before; 0: there was none
  uint64_t peak_before_last_ = 0;
  uint64_t wave_count_ = 0;
};

}  // namespace torchoffload
