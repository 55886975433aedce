// Note [Streams that may be destroyed]
// PyTorch takes streams from outside (ExternalStream). Their owner may destroy one whenever it likes, and any call that
// names a destroyed stream may fail, hang or reach another stream that got its handle. Such a stream is there for sure
// only while it is the current one of the calling thread. So no call of ours names it at any other time:
// - What was saved on it moves if it is still current when the copy is enqueued, and else it is kept.
// - The allocator is not told that it used a source: it would ask the stream when the memory is freed. A source is
//   dropped after the host has waited for its copy, which is after the operators that filled it; then no stream needs
//   to wait.
// - A reload buffer is dropped after the stream was told to wait for the copy, if it is current, and else after the
//   host has waited.
// - It is not remembered what such a stream has waited for, and a point of it says nothing of one that has its id
//   later.
#include "engine/stream_order.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace torchoffload {

// ---- waits ----

// Every consumer of what was reloaded comes by both of its waits, the first one too. So where the first is left out,
// the second is as well: nothing would be missing else.
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

// On I/O, where asking costs little and a wait of the host blocks, nothing is remembered.
bool StreamOrder::must_wait(Rule rule, StreamId waiter, Point point) const {
  if (is_left_out(rule) || point.is_beginning()) return false;
  if (is_polled(point)) return !is_reached(point);
  return !is_ordered(waiter, point);
}

void StreamOrder::wait(Rule rule, StreamId waiter, Point point) {
  if (!must_wait(rule, waiter, point)) return;
  without_gil(waiter, [&] { streams_.wait(waiter, point); });
  remember({waiter, point.stream, point.serial});
}

void StreamOrder::remember(const Made& made) {
  if (is_polled({made.producer, made.serial}) || !is_lasting(made.waiter)) return;
  const auto known = std::find_if(made_.begin(), made_.end(), [&](const Made& before) {
    return before.waiter == made.waiter && before.producer == made.producer;
  });
  if (known != made_.end()) {
    known->serial = std::max(known->serial, made.serial);  // another thread may have come further
  } else {
    made_.push_back(made);
  }
}

void StreamOrder::remember(const Batch& batch) {
  for (const Made& made : batch.made_) remember(made);
}

void StreamOrder::Batch::wait(Rule rule, StreamId waiter, Point point) {
  if (is_left_out(rule)) return;
  const bool is_known = std::any_of(made_.begin(), made_.end(), [&](const Made& made) {
    return made.waiter == waiter && made.producer == point.stream && made.serial >= point.serial;
  });
  if (is_known) return;
  streams_.wait(waiter, point);
  made_.push_back({waiter, point.stream, point.serial});
}

void StreamOrder::synchronize(Point point) {
  if (point.is_beginning()) return;
  const BlockingSection blocking;
  streams_.synchronize(point);
}

// ---- memory ----

void StreamOrder::retire(DeviceBytes bytes, Rule rule) noexcept {
  if (!bytes.memory) return;
  try {
    bool is_free = false;
    try {
      is_free = may_be_dropped(bytes, rule);
    } catch (const std::exception&) {  // a failing device says so at the next call that matters
    }
    if (is_free) {
      Operation::drop_later(std::move(bytes.memory));
    } else {
      retired_.push_back({std::move(bytes), rule});
    }
  } catch (const std::exception&) {  // no memory for the list: better held for ever than handed on too early
    if (bytes.memory) (void)bytes.memory.release();
  }
}

bool StreamOrder::may_be_dropped(const DeviceBytes& bytes, Rule rule) {
  if (bytes.busy_until.is_beginning()) return true;
  if (is_polled(bytes.busy_until)) return mutated(Mutant::IoMemoryHeldUntilDone) || is_reached(bytes.busy_until);
  if (is_ordered(bytes.stream, bytes.busy_until)) return true;
  if (streams_.is_capturing()) return false;
  if (bytes.is_buffer ? can_be_used(bytes.stream) : is_lasting(bytes.stream)) {
    wait(rule, bytes.stream, bytes.busy_until);
  } else if (!is_left_out(rule)) {
    synchronize(bytes.busy_until);
  }
  return true;
}

void StreamOrder::reap() {
  if (retired_.empty() || streams_.is_capturing()) return;
  for (Retired& retired : std::exchange(retired_, {})) retire(std::move(retired.bytes), retired.rule);
}

void StreamOrder::finish_retired() {
  std::vector<Point> busy;
  for (const Retired& retired : retired_) {
    if (is_polled(retired.bytes.busy_until)) busy.push_back(retired.bytes.busy_until);
  }
  if (busy.empty()) return;
  {
    const BlockingSection blocking;
    for (const Point& point : busy) streams_.synchronize(point);
  }
  reap();
}

}  // namespace torchoffload
