#include "testing/sim_world.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "device/backend.h"

namespace torchoffload {

namespace {

// The calling thread's current device and streams, valid for one simulation.
struct CurrentStreams {
  uint64_t simulation = 0;
  int device = 0;
  std::map<int, StreamId> stream_of_device;
};

CurrentStreams& current_streams(uint64_t simulation) {
  thread_local CurrentStreams current;
  if (current.simulation != simulation) current = CurrentStreams{simulation, 0, {}};
  return current;
}

}  // namespace

SimWorld& SimWorld::instance() {
  static SimWorld* const world = new SimWorld;
  return *world;
}

void SimWorld::start(const SimOptions& options) {
  const MutexLock lock(mutex_);
  if (running_) throw std::logic_error("a simulation is running already");
  if (options.sequence_number == nullptr) throw std::invalid_argument("a simulation needs a sequence number");
  if (options.device_count < 1) throw std::invalid_argument("a simulation needs at least one device");
  for (int index = static_cast<int>(devices_.size()); index < options.device_count; ++index) {
    const std::string suffix = "_stream[" + std::to_string(index) + "]";
    Device added;
    added.compute = {add_stream(index, StreamRole::Compute, "compute" + suffix)};
    added.offload = add_stream(index, StreamRole::Offload, "offload" + suffix);
    added.reload = add_stream(index, StreamRole::Reload, "reload" + suffix);
    devices_.push_back(added);
  }
  if (!disk_threads_) disk_threads_ = add_stream(0, StreamRole::Host, "the host");
  for (Device& device : devices_) device.compute_in_use = 1;
  tells_origins_ = true;
  for (Stream& stream : streams_) {
    stream.reached_serial += stream.snapshots.size();
    stream.snapshots.clear();
    stream.clock = {};
    stream.run_count = 0;
    stream.is_external = stream.is_destroyed = false;
  }
  options_ = options;
  random_.seed(options.seed);
  host_clock_ = {};
  races_.clear();
  races_thrown_ = 0;
  heap_.reset_statistics();
  ++simulation_;
  running_ = true;
}

void SimWorld::stop() {
  const MutexLock lock(mutex_);
  if (!running_) throw std::logic_error("no simulation is running");
  run_all();
  accesses_.clear();
  pending_.clear();
  heap_.release_pools();
  running_ = false;
}

bool SimWorld::is_running() const {
  const MutexLock lock(mutex_);
  return running_;
}

SimMode SimWorld::mode() const {
  const MutexLock lock(mutex_);
  return running_ ? options_.mode : SimMode::Early;
}

uint64_t SimWorld::draw(uint64_t choices) {
  const MutexLock lock(mutex_);
  return random_() % choices;
}

uint32_t SimWorld::add_stream(int device, StreamRole role, const std::string& name) {
  Stream added;
  added.id = next_stream_id();
  added.index = static_cast<uint32_t>(streams_.size());
  added.device = device;
  added.role = role;
  added.name = name;
  index_of_.emplace(added.id, added.index);
  streams_.push_back(std::move(added));
  return streams_.back().index;
}

SimWorld::Device& SimWorld::device(int index) {
  if (index < 0 || index >= static_cast<int>(devices_.size())) {
    throw std::invalid_argument("no simulated device " + std::to_string(index));
  }
  return devices_[static_cast<size_t>(index)];
}

SimWorld::Stream& SimWorld::stream(StreamId id) {
  const auto found = index_of_.find(id);
  if (found == index_of_.end()) throw std::invalid_argument("not a simulated stream: " + std::to_string(id));
  return streams_[found->second];
}

SimWorld::Stream& SimWorld::used(StreamId id) {
  Stream& found = stream(id);
  if (found.is_destroyed) report("race: " + found.name + " is used after its owner destroyed it");
  return found;
}

StreamId SimWorld::make_external_stream(int index) {
  const StreamId made = make_compute_stream(index);
  const MutexLock lock(mutex_);
  stream(made).is_external = true;
  return made;
}

void SimWorld::destroy_stream(StreamId id) {
  const MutexLock lock(mutex_);
  stream(id).is_destroyed = true;
}

bool SimWorld::is_external(StreamId id) {
  const MutexLock lock(mutex_);
  return stream(id).is_external;
}

bool SimWorld::is_compute(StreamId id) {
  const MutexLock lock(mutex_);
  return stream(id).role == StreamRole::Compute;
}

StreamId SimWorld::stream_of(int index, StreamRole role) {
  const MutexLock lock(mutex_);
  const Device& found = device(index);
  switch (role) {
    case StreamRole::Compute:
    case StreamRole::Host:
    case StreamRole::Side:
      break;
    case StreamRole::Offload:
      return streams_[found.offload].id;
    case StreamRole::Reload:
      return streams_[found.reload].id;
  }
  return streams_[found.compute.front()].id;
}

StreamId SimWorld::make_compute_stream(int index) {
  const MutexLock lock(mutex_);
  Device& found = device(index);
  const size_t made = found.compute_in_use++;
  if (made == found.compute.size()) {
    const std::string name = "compute_stream[" + std::to_string(index) + "]#" + std::to_string(made + 1);
    found.compute.push_back(add_stream(index, StreamRole::Compute, name));
  }
  return streams_[found.compute[made]].id;
}

StreamId SimWorld::make_side_stream(int index) {
  const MutexLock lock(mutex_);
  device(index);
  return streams_[add_stream(index, StreamRole::Side, "side_stream[" + std::to_string(index) + "]")].id;
}

StreamId SimWorld::current_stream(int index) {
  const MutexLock lock(mutex_);
  const CurrentStreams& current = current_streams(simulation_);
  const auto chosen = current.stream_of_device.find(index);
  return chosen != current.stream_of_device.end() ? chosen->second : streams_[device(index).compute.front()].id;
}

int SimWorld::current_device() {
  const MutexLock lock(mutex_);
  return current_streams(simulation_).device;
}

void SimWorld::set_current_stream(StreamId id) {
  const MutexLock lock(mutex_);
  const Stream& chosen = used(id);
  if (chosen.role != StreamRole::Compute && chosen.role != StreamRole::Side)
    throw std::invalid_argument("operators cannot run on " + chosen.name);
  CurrentStreams& current = current_streams(simulation_);
  current.device = chosen.device;
  current.stream_of_device[chosen.device] = id;
}

void SimWorld::set_current_device(int index) {
  const MutexLock lock(mutex_);
  device(index);
  current_streams(simulation_).device = index;
}

const SimWorld::Snapshot* SimWorld::snapshot(Point point) {
  const Stream& recorded = stream(point.stream);
  if (point.serial <= recorded.reached_serial) return nullptr;
  const uint64_t position = point.serial - recorded.reached_serial - 1;
  if (position >= recorded.snapshots.size()) {
    throw std::invalid_argument("point " + std::to_string(point.serial) + " of " + recorded.name +
                                " was never recorded");
  }
  return &recorded.snapshots[position];
}

Point SimWorld::record(StreamId id) {
  const MutexLock lock(mutex_);
  begin_call();
  Stream& recorded = used(id);
  recorded.clock.join(host_clock_);
  recorded.snapshots.push_back({recorded.clock, recorded.run_count + recorded.queue.size()});
  end_call();
  return {id, recorded.reached_serial + recorded.snapshots.size()};
}

void SimWorld::wait(StreamId waiter, Point point) {
  const MutexLock lock(mutex_);
  begin_call();
  Stream& waiting = used(waiter);
  if (!point.is_beginning() && point.stream != waiter) {
    if (const Snapshot* reached = snapshot(point)) {
      waiting.clock.join(reached->clock);
      Command command;
      command.point = point;
      enqueue(waiting, command);
    }
  }
  end_call();
}

void SimWorld::copy_out(std::byte* slot, const void* source, uint64_t nbytes, StreamId id) {
  const MutexLock lock(mutex_);
  begin_call();
  Stream& copying = used(id);
  const MemoryOwner owner = require_block(copying, AccessKind::CopyOutReads, source, nbytes);
  const auto begin = reinterpret_cast<uint64_t>(source);
  check_no_open_operator(copying, {begin, begin + nbytes});
  access(copying, AccessKind::CopyOutReads, owner, source, nbytes);
  access(copying, AccessKind::CopyOutWrites, MemoryOwner::Slot, slot, nbytes);
  enqueue(copying, {CommandKind::CopyOut, {}, slot, static_cast<const std::byte*>(source), nbytes});
  end_call();
}

void SimWorld::copy_in(void* target, const std::byte* slot, uint64_t nbytes, StreamId id) {
  const MutexLock lock(mutex_);
  begin_call();
  Stream& copying = used(id);
  const MemoryOwner owner = require_block(copying, AccessKind::CopyInWrites, target, nbytes);
  access(copying, AccessKind::CopyInReads, MemoryOwner::Slot, slot, nbytes);
  access(copying, AccessKind::CopyInWrites, owner, target, nbytes);
  enqueue(copying, {CommandKind::CopyIn, {}, static_cast<std::byte*>(target), slot, nbytes});
  end_call();
}

void SimWorld::synchronize(Point point) {
  const MutexLock lock(mutex_);
  begin_call();
  if (!point.is_beginning()) {
    if (const Snapshot* reached = snapshot(point)) host_clock_.join(reached->clock);
    run_to(point);
  }
  end_call();
}

void SimWorld::synchronize_device(int index) {
  const MutexLock lock(mutex_);
  begin_call();
  for (Stream& stream : streams_) {
    if (stream.device != index || stream.role == StreamRole::Host) continue;
    host_clock_.join(stream.clock);
    run(stream, stream.run_count + stream.queue.size());
  }
  end_call();
}

// A compute_stream runs at once, and so does the work that it waits for; the other two queue.
void SimWorld::enqueue(Stream& stream, const Command& command) {
  stream.queue.push_back(command);
  if (stream.role == StreamRole::Compute || options_.mode == SimMode::Early || !running_) {
    run(stream, stream.run_count + stream.queue.size());
  }
}

void SimWorld::run(Stream& stream, uint64_t command_count) {
  while (stream.run_count < command_count) {
    const Command command = stream.queue.front();
    carry_out(command);
    stream.queue.pop_front();
    ++stream.run_count;
  }
}

void SimWorld::carry_out(const Command& command) {
  switch (command.kind) {
    case CommandKind::Wait:  // the awaited work was enqueued before it, so this ends
      return run_to(command.point);
    case CommandKind::CopyOut:
    case CommandKind::CopyIn:
      std::memcpy(command.target, command.source, command.nbytes);
  }
}

void SimWorld::run_to(Point point) {
  if (const Snapshot* reached = snapshot(point)) run(stream(point.stream), reached->command_count);
}

void SimWorld::run_all() {
  for (Stream& stream : streams_) run(stream, stream.run_count + stream.queue.size());
}

// Streams of earlier simulations stay in the list, so the choice is among those that have something to run. A queue
// that is alone runs in a third of the turns: copies come late as often as early.
void SimWorld::run_some() {
  constexpr size_t kLeastChoices = 3;
  std::vector<Stream*> busy;
  for (uint64_t turn = random_() % 3; turn > 0; --turn) {
    busy.clear();
    for (Stream& stream : streams_) {
      if (!stream.queue.empty()) busy.push_back(&stream);
    }
    const size_t choice = random_() % std::max(kLeastChoices, busy.size());
    if (choice < busy.size()) run(*busy[choice], busy[choice]->run_count + 1 + random_() % busy[choice]->queue.size());
  }
}

uint64_t SimWorld::queued_count() const {
  const MutexLock lock(mutex_);
  uint64_t count = 0;
  for (const Stream& stream : streams_) count += stream.queue.size();
  return count;
}

}  // namespace torchoffload
