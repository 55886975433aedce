#include "device/streams.h"

#include <atomic>

namespace torchoffload {

StreamId next_stream_id() {
  static std::atomic<StreamId> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace torchoffload
