// Note [Streams that may be destroyed]
// PyTorch accepts streams that others made (ExternalStream). The owner may destroy such a stream at any time, and any
// call that names a destroyed stream may fail, hang, or reach another stream that was given the same handle. It is
// certain to exist only while it is the current stream of the calling thread. So no call of ours names it at any other
// time:
// - A tensor that was saved on it moves if the stream is still current when the copy is enqueued. Otherwise the tensor
//   is kept.
// - The allocator is not told that the stream used a source, because it would ask the stream when the memory is freed.
//   Instead, a source is dropped after the host has waited for its copy, which runs after the operators that filled the
//   source. Then no stream needs to wait.
// - A reload buffer is dropped after the stream was told to wait for the copy, if the stream is current, and otherwise
//   after the host has waited.
// - The waits of such a stream are not remembered, because another stream may have its id later.
#include "engine/stream_order.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

namespace torchoffload {

// ---- waits ----

// Every consumer of reloaded bytes makes both of the consumer's waits. So the mutant that leaves out the first one has
// to leave out the second one as well, or the consumer would still wait.
bool StreamOrder::is_left_out(Rule rule) {
  if (rule == Rule::LaterConsumerWaitsForReload && mutated(Mutant::ConsumerWaitsForReload)) return true;
  return mutated(static_cast<Mutant>(rule));
}

bool StreamOrder::is_ordered(StreamId waiter, Point point) const {
  if (point.is_beginning()) return true;
  if (waiter == point.stream) return is_lasting(waiter);
  return std::any_of(made_.begin(), made_.end(), [&](const Made& made) {
    return made.waiter == waiter && made.producer == point.stream && made.serial >= point.serial;
  });
}

// For I/O the backend is asked, since asking costs little while a wait of the host blocks. No waits are remembered
// then.
bool StreamOrder::must_wait(Rule rule, StreamId waiter, Point point) const {
  if (is_left_out(rule) || point.is_beginning()) return false;
  if (is_polled(point)) return !is_reached(point);
  return !is_ordered(waiter, point);
}

std::optional<StreamOrder::Wanted> StreamOrder::wanted(Rule rule, StreamId waiter, Point point) const {
  if (is_polled(point) || !is_lasting(waiter) || !must_wait(rule, waiter, point)) return std::nullopt;
  return Wanted{rule, waiter, point};
}

void StreamOrder::wait(Rule rule, StreamId waiter, Point point) {
  if (!must_wait(rule, waiter, point)) return;
  without_gil(waiter, [&] { streams_.wait(waiter, point); });
  remember({waiter, point.stream, point.serial});
}

void StreamOrder::remember(const Made& made) {
  // New streams that may be destroyed can come without end, so their waits are not remembered.
  if (is_polled({made.producer, made.serial}) || !is_lasting(made.waiter) || !is_lasting(made.producer)) return;
  const auto known = std::find_if(made_.begin(), made_.end(), [&](const Made& before) {
    return before.waiter == made.waiter && before.producer == made.producer;
  });
  if (known != made_.end()) {
    known->serial = std::max(known->serial, made.serial);  // another thread may have made a later wait meanwhile
  } else {
    try {
      made_.push_back(made);
    } catch (const std::bad_alloc&) {  // a wait that is not remembered is made again
    }
  }
}

void StreamOrder::remember(const Batch& batch) {
  for (const Made& made : batch.made()) remember(made);
}

void StreamOrder::Batch::wait(Rule rule, StreamId waiter, Point point) {
  if (is_left_out(rule)) return;
  size_t place = 0;
  while (place < made_count_ && (made_[place].waiter != waiter || made_[place].producer != point.stream)) ++place;
  if (place < made_count_ && made_[place].serial >= point.serial) return;
  streams_.wait(waiter, point);
  if (place == made_.size()) return;
  made_[place] = {waiter, point.stream, point.serial};
  made_count_ = std::max(made_count_, place + 1);
}

void StreamOrder::synchronize(Point point) {
  if (point.is_beginning()) return;
  const BlockingSection blocking;
  streams_.synchronize(point);
}

// ---- memory ----

void StreamOrder::defer_free(DeviceBytes bytes, Rule rule) noexcept {
  if (!bytes.memory) return;
  try {
    bool is_free = false;
    try {
      is_free = may_be_dropped(bytes, rule);
    } catch (const std::exception&) {  // a failing device raises again at the next call that can report it
    }
    if (!is_free) deferred_.push_back({std::move(bytes), rule});
  } catch (const std::exception&) {  // no memory for the list: leaked, which is safer than dropped too early
    if (bytes.memory) (void)bytes.memory.release();
  }
}

bool StreamOrder::may_be_dropped(const DeviceBytes& bytes, Rule rule) {
  if (bytes.busy_until.is_beginning()) return true;
  if (is_polled(bytes.busy_until)) return mutated(Mutant::IoMemoryHeldUntilDone) || is_reached(bytes.busy_until);
  if (is_ordered(bytes.stream, bytes.busy_until)) return true;
  if (streams_.is_capturing()) return false;
  if (can_wait_to_drop(bytes)) {
    wait(rule, bytes.stream, bytes.busy_until);
  } else if (!is_left_out(rule)) {
    synchronize(bytes.busy_until);
  }
  return true;
}

void StreamOrder::free_deferred_list() {
  if (streams_.is_capturing()) return;
  for (Deferred& each : std::exchange(deferred_, {})) defer_free(std::move(each.bytes), each.rule);
}

void StreamOrder::finish_deferred() {
  std::vector<Point> busy;
  for (const Deferred& each : deferred_) {
    if (is_polled(each.bytes.busy_until)) busy.push_back(each.bytes.busy_until);
  }
  if (busy.empty()) return;
  {
    const BlockingSection blocking;
    for (const Point& point : busy) streams_.synchronize(point);
  }
  free_deferred();
}

}  // namespace torchoffload
