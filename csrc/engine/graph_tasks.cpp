// R14: records that a backward reloaded and did not use go back to their slots when that backward ends.
//
// Note [Ends of graph tasks]
// A graph task is one call of autograd's engine. It may ask for only a part of a tape: autograd.grad with inputs, one
// of several branches, a backward that raises. The records that it reloaded ahead would then fill the reload window for
// as long as the graph lives. Bytes that other handles of a record wait for would stay on the device without being
// counted in a window. Autograd calls back at the end of a graph task that succeeds. A graph task that fails makes no
// callback, but destroys its callbacks. So a token is put into the callback and into nothing else: once the token is
// gone, the graph task is over. The next tape that opens, and the next graph task that asks, look for such tokens. A
// graph task that freed its graph may have left another graph of the same tape, such as that of the next micro-batch,
// for the next graph task. Records reloaded ahead stay in the window for that one, until another tape opens or is
// asked. A tape belongs to the graph task that asked it last. A tape whose backward has not begun belongs to none, so
// its reloaded records stay, too.
#include <algorithm>

#include "engine/reloader.h"

namespace torchoffload {

// Called once for each unpack in a backward.
void Reloader::note_asking(TapeId tape) {
  const int graph_task = program::graph_task();
  ThreadState::current().asked = {this, tape, graph_task};
  if (held(tape).asked_by == graph_task) return;
  held(tape).asked_by = graph_task;  // before the next line: this tape's reloaded records are wanted now
  release_reloads_of_ended();
  await_end_of(graph_task);
}

void Reloader::await_end_of(int graph_task) {
  for (const AskingTask& known : asking_tasks_) {
    if (known.id == graph_task) return;
  }
  const auto token = std::make_shared<const int>(graph_task);
  asking_tasks_.push_back({graph_task, token});
  const Ahead ahead = program::keeps_graph() ? Ahead::GoesBack : Ahead::Stays;
  program::at_end_of_graph_task([this, weak = owner_(), token, ahead] {
    if (Operation::is_shut_down()) return;
    const WithGil with_gil;
    const std::shared_ptr<const void> owner = weak.lock();  // null: its directory is used no more
    if (owner == nullptr || records_.is_inherited()) return;
    const Operation operation;
    (void)release_reloads(*token, ahead);
  });
}

void Reloader::release_reloads_of_ended() {
  if (asking_tasks_.empty() || mutated(Mutant::FailedTaskIsNoticed)) return;
  std::vector<int> ended;
  for (const AskingTask& task : asking_tasks_) {
    if (task.ended.expired()) ended.push_back(task.id);
  }
  for (const int id : ended) {
    if (release_reloads(id, Ahead::GoesBack))
      std::erase_if(asking_tasks_, [&](const AskingTask& task) { return task.id == id; });
  }
}

bool Reloader::release_reloads(int graph_task, Ahead ahead) {
  std::vector<TapeId> asked;
  for (const HeldTape& tape : records_.held_tapes) {
    if (tape.context && tape.asked_by == graph_task) asked.push_back(tape.id);
  }
  bool is_all = true;
  for (const TapeId tape : asked) {
    if (ledger_.has_tape(tape) && !release_reloads(tape, graph_task, ahead)) is_all = false;
  }
  return is_all;
}

// A record whose slot is still being written is left as it is: no wait is made here, and its bytes stay on the device
// until a later call.
bool Reloader::release_reloads(TapeId tape, int graph_task, Ahead ahead) {
  std::vector<RecordId> reloaded;
  for (const Save& save : ledger_.tape(tape).saves) {
    if (ledger_.is_live(save.record) && ledger_.record(save.record).state == RecordState::Reloaded)
      reloaded.push_back(save.record);
  }
  bool is_all = ahead == Ahead::GoesBack;
  if (ahead == Ahead::GoesBack) {
    held(tape).windows.consumer_ended();
    for (const RecordId id : std::vector(windows_.ahead())) {
      const bool is_of_tape = ledger_.is_live(id) && ledger_.record(id).tape == tape;
      if (is_of_tape && !mutated(Mutant::EndedTaskPassesBy)) pass_by(id);
    }
  }
  const auto is_reloaded = [&](RecordId id) REQUIRES(gil) {
    return ledger_.is_live(id) && ledger_.record(id).state == RecordState::Reloaded;
  };
  for (const RecordId id : reloaded) {
    if (!is_reloaded(id) || mutated(Mutant::EndedTaskWeakens)) continue;
    records_.weaken(id);
    if (is_reloaded(id) && ledger_.record(id).has_slot) is_all = false;
  }
  // Another graph task may have asked for the tape meanwhile.
  if (is_all && ledger_.has_tape(tape) && held(tape).asked_by == graph_task) held(tape).asked_by = kNoGraphTask;
  return is_all;
}

}  // namespace torchoffload
