#include "device/backend.h"

#include <atomic>

namespace torchoffload {

size_t next_backend_number() {
  static std::atomic<size_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace torchoffload
