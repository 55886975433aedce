// Reloader: the copies in of one engine, because a consumer asks for a record or ahead of it (reload.cpp, prefetch.cpp),
// the work of an unpack in each state of a record (unpack.cpp), and the ends of graph tasks (graph_tasks.cpp).
// Ownership:     tokens of the graph tasks that asked for bytes. The records and the parts of their engine outlive it.
// Thread safety: needs the GIL. A call that may block releases it for that time.
//                See Note [Copies that others come between].
// Failures:      an unpack that throws leaves its record as it was, and can be tried again.
// Stream order:  R6 to R8, R11, R14.
// Shutdown:      part of its engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/types.h"
#include "core/windows.h"
#include "engine/offloader.h"
#include "engine/program.h"
#include "engine/records.h"
#include "engine/saved_bytes.h"
#include "engine/stream_order.h"
#include "system/gil.h"

namespace torchoffload {

class Reloader {
 public:
  // Tells the object that this one is a part of. A share in that object keeps this one.
  using Owner = std::function<std::weak_ptr<const void>()>;

  Reloader(Records& records, Offloader& offloader, Owner owner)
      : records_(records),
        offloader_(offloader),
        owner_(std::move(owner)),
        backend_(records.backend),
        streams_(records.streams),
        slots_(records.slots),
        ledger_(records.ledger),
        windows_(records.windows),
        lessons_(records.lessons),
        timeline_(records.timeline) {}

  // Engine says what these do.
  DeviceBytes unpack(RecordHandle& handle, bool in_backward) REQUIRES(gil);
  static void go_on_reloading() REQUIRES(gil);
  void forward_ended(TapeId tape) REQUIRES(gil);

  // Releases the reloads of ended graph tasks: of those that failed, and of those whose reloads could not be released
  // when they ended. May block.
  void release_reloads_of_ended() REQUIRES(gil);

 private:
  // A graph task that asked this engine for bytes. The object of `ended` is destroyed with it, however it ends.
  struct AskingTask {
    int id = kNoGraphTask;
    std::weak_ptr<const void> ended;
  };
  struct Ask;
  struct ReloadCopy;

  HeldRecord& held(RecordId id) REQUIRES(gil) { return records_.held(id); }
  HeldTape& held(TapeId id) REQUIRES(gil) { return records_.held(id); }

  // ---- the records that a backward asks for: unpack.cpp ----

  // There is one function for each state that a record may be in. Each may block. Those that return an optional return
  // nullopt if the state has to be read again.

  // Notes which save a backward asks for, and returns the records that it passed by to their slots.
  void backward_asks(Ask& ask) REQUIRES(gil);
  // Notes the first ask of a tape's backward. If another backward was expected, the records reloaded for that one go
  // back to their slots.
  void backward_begins(TapeId tape) REQUIRES(gil);
  // A wait to make among the calls of a reload, if one is started: the GIL is then released once for both.
  using AlsoWait = std::optional<StreamOrder::Wanted>;
  // Starts reloads ahead of the consumer, once for each ask. Returns whether it did so now: it may have blocked then.
  bool prefetch_for(Ask& ask, const AlsoWait& also = {}) REQUIRES(gil);
  std::optional<DeviceBytes> unpack_source(Ask& ask) REQUIRES(gil);  // Resident or Offloading
  std::optional<DeviceBytes> unpack_away(Ask& ask) REQUIRES(gil);    // Offloaded
  // The record's slot with its bytes in memory. Blocks while they are on a disk. Throws if they cannot be read.
  HeldSlot hold_slot(RecordId id) REQUIRES(gil);
  void wait_for_reload(Ask& ask) REQUIRES(gil);                    // Reloading
  std::optional<DeviceBytes> unpack_here(Ask& ask) REQUIRES(gil);  // Reloaded
  // Returns the bytes after the allocator was told that the current stream uses them. Never blocks.
  DeviceBytes hand_out(RecordId id, const DeviceBytes& bytes) REQUIRES(gil);
  // Keeps a record whose source was resized while its copy was under way (R10). Throws if the source has become too
  // small. Never blocks.
  void keep_if_resized(RecordId id) REQUIRES(gil);
  // Device memory is short: drops buffers reloaded ahead, and sources on their way out, of every tape. May block.
  void free_device_memory() REQUIRES(gil);

  // ---- copies in: reload.cpp ----

  enum class Reload : uint8_t { AskedFor, Ahead };
  // Starts the reloads of those records that are Offloaded. May block.
  void start_reloads(std::span<const CopyWindows::Ahead> wanted, Reload why, const AlsoWait& also = {}) REQUIRES(gil);
  // The arguments of the calls that enqueue the copy. nullopt: the record's slot is not in memory.
  std::optional<ReloadCopy> plan_reload(const CopyWindows::Ahead& wanted, StreamId consumer) REQUIRES(gil);
  // Allocates the buffers. Of the copies ahead only the first ones may find memory. Called without the GIL.
  void allocate(std::span<ReloadCopy> copies, Reload why) const;
  // Enqueues the copies that have buffers. Called without the GIL, and may block.
  void enqueue(std::span<ReloadCopy> copies, StreamId consumer, StreamOrder::Batch& waits);
  void enqueue(ReloadCopy& copy, StreamOrder::Batch& waits);
  // Gives the buffer of a copy that was enqueued to the record, or frees it if another thread has reloaded the record
  // meanwhile. Only the latter may block.
  void reload_is_enqueued(ReloadCopy& copy, StreamId consumer, Reload why) REQUIRES(gil);
  // Enters a reload into ledger, windows and counts.
  void begin_reload(const CopyWindows::Ahead& started, Reload why) REQUIRES(gil);
  // The consumer's stream waits for the reload by now. Throws if the store could not read bytes that a consumer asked
  // for. A read ahead that failed only puts the record back, to be read again.
  void finish_reload(RecordId id) REQUIRES(gil);

  // ---- reloads ahead of the consumer: prefetch.cpp ----

  // Starts reloads ahead for a tape that was asked, and for the tapes after it, as far as the window goes. May block.
  void prefetch(TapeId tape, const AlsoWait& also = {}) REQUIRES(gil);
  // Starts reloads of the ends of the tapes whose backwards are expected next, in no more than `most_bytes`. May block.
  void prefetch_coming(uint64_t kept_bytes, uint64_t most_bytes) REQUIRES(gil);
  // Starts reloads of one tape as far as its window and `most_bytes` go. Returns whether all of the tape was looked at.
  // May block.
  bool reload_ahead(TapeId tape, uint64_t kept_bytes, uint64_t most_bytes, AtSource at_source,
                    const AlsoWait& also = {}) REQUIRES(gil);
  // If slots may be on a disk: begins to read those that are reloaded next, as far as there is room in memory.
  void fetch_ahead(TapeId tape) REQUIRES(gil);
  // Passes by the records that the consumer, now at `place`, has left behind it by more than the reload window (R11).
  // May block.
  void let_pass(TapeId tape, uint64_t place) REQUIRES(gil);
  // Returns a record that was reloaded ahead to its slot, unused: its buffer is freed. May block.
  void pass_by(RecordId id) REQUIRES(gil);
  // Passes by the records reloaded ahead for other tapes than this one, if their backwards have not begun. May block.
  void pass_by_others(TapeId tape) REQUIRES(gil);

  // ---- the ends of graph tasks: graph_tasks.cpp ----

  // Notes that the current graph task asks for the tape, and arranges for its end. May block.
  void note_asking(TapeId tape) REQUIRES(gil);
  // Has autograd call back at the end of the graph task, to release its reloads. Does nothing if that was arranged
  // already.
  void await_end_of(int graph_task) REQUIRES(gil);
  enum class Ahead : uint8_t { GoesBack, Stays };
  // Releases the reloads of a graph task for the tapes that no other task has asked since: for all of them, or for one.
  // `ahead` says whether records reloaded ahead of their consumer go back too. Returns whether all of it went back. May
  // block.
  bool release_reloads(int graph_task, Ahead ahead) REQUIRES(gil);
  bool release_reloads(TapeId tape, int graph_task, Ahead ahead) REQUIRES(gil);

  Records& records_;
  Offloader& offloader_;
  const Owner owner_;
  const Backend& backend_;
  StreamOrder& streams_ GUARDED_BY(gil);
  SlotBudget& slots_ GUARDED_BY(gil);
  Ledger& ledger_ GUARDED_BY(gil);
  CopyWindows& windows_ GUARDED_BY(gil);
  Lessons& lessons_ GUARDED_BY(gil);
  Timeline& timeline_ GUARDED_BY(gil);
  std::vector<AskingTask> asking_tasks_ GUARDED_BY(gil);
};

}  // namespace torchoffload
