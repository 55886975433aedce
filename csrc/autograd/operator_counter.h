// OperatorCounter: the listener that runs what it is shown and counts it. Tells what being shown operators costs, and
// whether a mode is shown what it should be.
// Ownership:     as any listener.
// Thread safety: the counts may be read on any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "autograd/operator_listener.h"

namespace torchoffload {

class OperatorCounter final : public OperatorListener {
 public:
  void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) override {
    operators_.fetch_add(1, std::memory_order_relaxed);
    op.callBoxed(stack);
  }
  void opaque(const char* /*name*/, c10::ArrayRef<at::Tensor> /*inputs*/, Region region) override {
    regions_.fetch_add(1, std::memory_order_relaxed);
    static_cast<void>(region());
  }

  uint64_t operators() const { return operators_; }
  uint64_t regions() const { return regions_; }

 private:
  std::atomic<uint64_t> operators_ = 0;
  std::atomic<uint64_t> regions_ = 0;
};

}  // namespace torchoffload
