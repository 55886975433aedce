// Ledger and windows for Python tests: hypothesis drives them through random operation sequences.
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "core/extent.h"
#include "core/ledger.h"
#include "core/tape_records.h"
#include "core/windows.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

using Key = std::pair<uint32_t, uint32_t>;  // index, generation

// A ledger whose tapes have windows.
struct TestedLedger : Ledger {
  CopyWindows windows;
  std::map<uint32_t, TapeWindows> tapes;  // by index
};

RecordId record_id(Key key) { return {key.first, key.second}; }
TapeId tape_id(Key key) { return {key.first, key.second}; }
Key key(RecordId id) { return {id.index, id.generation}; }
Key key(TapeId id) { return {id.index, id.generation}; }

// Addresses are only compared, so any number names an object.
Identity identity(uint64_t storage, uint64_t version_counter, uint32_t version, uint64_t nbytes) {
  return {reinterpret_cast<const void*>(storage), reinterpret_cast<const void*>(version_counter), version,
          reinterpret_cast<const void*>(storage), nbytes};
}

Reason reason_named(const std::string& name) {
  for (size_t reason = 0; reason < kReasonCount; ++reason) {
    if (name == to_string(static_cast<Reason>(reason))) return static_cast<Reason>(reason);
  }
  throw py::value_error("no such reason: " + name);
}

}  // namespace

void bind_core_testing(py::module_& module) {
  py::class_<TestedLedger>(module, "Ledger")
      .def(py::init<>())
      .def("open_tape",
           [](TestedLedger& self) {
             const TapeId tape = self.open_tape();
             self.tapes[tape.index] = {};
             return key(tape);
           })
      .def("close_tape",
           [](TestedLedger& self, Key tape) {
             self.tapes[tape.first].close(self.tape(tape_id(tape)).end_save());
             return self.close_tape(tape_id(tape)).gone;
           })
      .def("is_open", [](TestedLedger& self, Key tape) { return self.is_open(tape_id(tape)); })
      .def("add_record",
           [](TestedLedger& self, Key tape, uint64_t storage, uint64_t counter, uint32_t version,
              uint64_t storage_bytes, uint64_t begin, uint64_t end) {
             return key(self.add_record(tape_id(tape), identity(storage, counter, version, storage_bytes), {begin, end},
                                        Decision::move_to(Placement::Host)));
           })
      .def("find",
           [](TestedLedger& self, Key tape, uint64_t storage, uint64_t counter, uint32_t version,
              uint64_t storage_bytes, uint64_t begin, uint64_t end, uint64_t itemsize) -> std::optional<Key> {
             const auto found =
                 self.find(tape_id(tape), identity(storage, counter, version, storage_bytes), {begin, end}, itemsize);
             return found ? std::optional(key(*found)) : std::nullopt;
           })
      .def("add_handle", [](TestedLedger& self, Key id) { return self.add_handle(record_id(id)); })
      .def("drop_handle",
           [](TestedLedger& self, Key id, uint32_t seen) {
             const auto dropped = self.drop_handle(record_id(id), seen);
             return std::tuple(dropped.released, dropped.all_seen, dropped.tape_gone);
           })
      .def("hold", [](TestedLedger& self, Key id) { self.hold(record_id(id)); })
      .def("release_hold",
           [](TestedLedger& self, Key id) {
             const auto dropped = self.release_hold(record_id(id));
             return std::tuple(dropped.released, dropped.all_seen, dropped.tape_gone);
           })
      .def("is_live", [](TestedLedger& self, Key id) { return self.is_live(record_id(id)); })
      .def("state", [](TestedLedger& self, Key id) { return std::string(to_string(self.record(record_id(id)).state)); })
      .def("has_slot", [](TestedLedger& self, Key id) { return self.record(record_id(id)).has_slot; })
      .def("keep",
           [](TestedLedger& self, Key id, const std::string& why) { self.keep(record_id(id), reason_named(why)); })
      .def("await_room", [](TestedLedger& self, Key id) { self.await_room(record_id(id)); })
      .def("stop_awaiting_room", [](TestedLedger& self, Key id) { return self.stop_awaiting_room(record_id(id)); })
      .def("begin_offload", [](TestedLedger& self, Key id) { self.begin_offload(record_id(id)); })
      .def("finish_offload", [](TestedLedger& self, Key id) { self.finish_offload(record_id(id)); })
      .def("use_source", [](TestedLedger& self, Key id) { self.use_source(record_id(id)); })
      .def("begin_reload", [](TestedLedger& self, Key id) { self.begin_reload(record_id(id)); })
      .def("begin_reload_ahead", [](TestedLedger& self, Key id,
                                    uint64_t expected_at) { self.begin_reload_ahead(record_id(id), expected_at); })
      .def("finish_reload", [](TestedLedger& self, Key id) { self.finish_reload(record_id(id)); })
      .def("weaken", [](TestedLedger& self, Key id) { self.weaken(record_id(id)); })
      .def("pass_by", [](TestedLedger& self, Key id) { self.pass_by(record_id(id)); })
      .def("mark_seen", [](TestedLedger& self, Key id, uint32_t seen) { return self.mark_seen(record_id(id), seen); })
      .def("all_seen", [](TestedLedger& self, Key id) { return self.all_seen(record_id(id)); })
      .def("live_records", &Ledger::live_records)
      .def("live_handles", &Ledger::live_handles)
      .def("live_tapes", &Ledger::live_tapes)
      .def("check_invariants", &Ledger::check_invariants)
      .def("take_reloads",
           [](TestedLedger& self, Key key_of_tape, uint64_t ahead_bytes, uint64_t window_bytes) {
             const TapeId tape = tape_id(key_of_tape);
             TapeWindows& its = self.tapes[tape.index];
             its.set_limits({0, window_bytes});
             const TapeRecords records(self, tape);
             std::vector<std::pair<Key, uint64_t>> taken;
             for (const auto& [id, save] : self.windows.take_reloads(its, ahead_bytes, AtSource::GoesOn, records))
               taken.emplace_back(key(id), save);
             return taken;
           })
      .def("passed_by", [](TestedLedger& self, Key key_of_tape, uint64_t save, const std::vector<Key>& ahead,
                           uint64_t window_bytes) {
        const TapeId tape = tape_id(key_of_tape);
        CopyWindows windows;
        TapeWindows its;
        its.set_limits({0, window_bytes});
        for (const Key& one : ahead) windows.reload_began(record_id(one), 0);
        std::vector<Key> keys;
        for (const RecordId id : windows.passed_by(its, save, TapeRecords(self, tape))) keys.push_back(key(id));
        return keys;
      });

  module.def("span_to_move", [](uint64_t begin, uint64_t end, uint64_t storage_bytes) {
    const Span moved = span_to_move({begin, end}, storage_bytes);
    return std::pair(moved.begin, moved.end);
  });
}

}  // namespace torchoffload
