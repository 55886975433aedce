// Ledger and schedule for Python tests: hypothesis drives them through random operation sequences.
#include <torch/csrc/utils/pybind.h>

#include "core/ledger.h"
#include "core/schedule.h"

namespace py = pybind11;

namespace torchoffload {

namespace {

using Key = std::pair<uint32_t, uint32_t>;  // index, generation

RecordId record_id(Key key) { return {key.first, key.second}; }
TapeId tape_id(Key key) { return {key.first, key.second}; }
Key key(RecordId id) { return {id.index, id.generation}; }
Key key(TapeId id) { return {id.index, id.generation}; }

// Addresses are only compared, so any number names an object.
Identity identity(uint64_t storage, uint64_t version_counter, uint32_t version, uint64_t nbytes) {
  return {reinterpret_cast<const void*>(storage), reinterpret_cast<const void*>(version_counter), version,
          reinterpret_cast<const void*>(storage), nbytes};
}

KeptReason reason_named(const std::string& name) {
  for (size_t reason = 0; reason < kKeptReasonCount; ++reason) {
    if (name == to_string(static_cast<KeptReason>(reason))) return static_cast<KeptReason>(reason);
  }
  throw py::value_error("no such reason: " + name);
}

}  // namespace

void bind_core_testing(py::module_& module) {
  py::class_<Ledger>(module, "Ledger")
      .def(py::init<>())
      .def("open_tape", [](Ledger& self) { return key(self.open_tape()); })
      .def("close_tape", [](Ledger& self, Key tape) { return self.close_tape(tape_id(tape)).gone; })
      .def("is_open", [](Ledger& self, Key tape) { return self.is_open(tape_id(tape)); })
      .def("add_record",
           [](Ledger& self, Key tape, uint64_t storage, uint64_t counter, uint32_t version, uint64_t storage_bytes,
              uint64_t begin, uint64_t end) {
             return key(
                 self.add_record(tape_id(tape), identity(storage, counter, version, storage_bytes), {begin, end}));
           })
      .def("find",
           [](Ledger& self, Key tape, uint64_t storage, uint64_t counter, uint32_t version, uint64_t storage_bytes,
              uint64_t begin, uint64_t end, uint64_t itemsize) -> std::optional<Key> {
             const auto found =
                 self.find(tape_id(tape), identity(storage, counter, version, storage_bytes), {begin, end}, itemsize);
             return found ? std::optional(key(*found)) : std::nullopt;
           })
      .def("add_handle", [](Ledger& self, Key id) { return self.add_handle(record_id(id)); })
      .def("drop_handle",
           [](Ledger& self, Key id, uint32_t seen) {
             const auto dropped = self.drop_handle(record_id(id), seen);
             return std::tuple(dropped.released, dropped.all_seen, dropped.tape_gone);
           })
      .def("hold", [](Ledger& self, Key id) { self.hold(record_id(id)); })
      .def("let_go",
           [](Ledger& self, Key id) {
             const auto dropped = self.let_go(record_id(id));
             return std::tuple(dropped.released, dropped.all_seen, dropped.tape_gone);
           })
      .def("is_live", [](Ledger& self, Key id) { return self.is_live(record_id(id)); })
      .def("state", [](Ledger& self, Key id) { return std::string(to_string(self.record(record_id(id)).state)); })
      .def("has_slot", [](Ledger& self, Key id) { return self.record(record_id(id)).has_slot; })
      .def("keep", [](Ledger& self, Key id, const std::string& why) { self.keep(record_id(id), reason_named(why)); })
      .def("begin_offload", [](Ledger& self, Key id) { self.begin_offload(record_id(id)); })
      .def("finish_offload", [](Ledger& self, Key id) { self.finish_offload(record_id(id)); })
      .def("use_source", [](Ledger& self, Key id) { self.use_source(record_id(id)); })
      .def("begin_reload", [](Ledger& self, Key id) { self.begin_reload(record_id(id)); })
      .def("begin_reload_ahead",
           [](Ledger& self, Key id, uint64_t expected_at) { self.begin_reload_ahead(record_id(id), expected_at); })
      .def("finish_reload", [](Ledger& self, Key id) { self.finish_reload(record_id(id)); })
      .def("give_up", [](Ledger& self, Key id) { self.give_up(record_id(id)); })
      .def("pass_by", [](Ledger& self, Key id) { self.pass_by(record_id(id)); })
      .def("mark_seen", [](Ledger& self, Key id, uint32_t seen) { return self.mark_seen(record_id(id), seen); })
      .def("all_seen", [](Ledger& self, Key id) { return self.all_seen(record_id(id)); })
      .def("live_records", &Ledger::live_records)
      .def("live_handles", &Ledger::live_handles)
      .def("live_tapes", &Ledger::live_tapes)
      .def("check_invariants", &Ledger::check_invariants)
      .def("take_reloads",
           [](Ledger& self, Key tape, uint64_t ahead_bytes, uint64_t window_bytes) {
             std::vector<std::pair<Key, uint64_t>> taken;
             for (const auto& [id, save] : Schedule::take_reloads(self, tape_id(tape), ahead_bytes, window_bytes))
               taken.emplace_back(key(id), save);
             return taken;
           })
      .def("passed_by",
           [](Ledger& self, Key tape, uint64_t save, const std::vector<Key>& ahead, uint64_t window_bytes) {
             std::vector<RecordId> ids;
             for (const Key& one : ahead) ids.push_back(record_id(one));
             std::vector<Key> keys;
             for (const RecordId id : Schedule::passed_by(self, tape_id(tape), save, ids, window_bytes))
               keys.push_back(key(id));
             return keys;
           });

  module.def("span_to_move", [](uint64_t begin, uint64_t end, uint64_t storage_bytes) {
    const Span moved = Schedule::span_to_move({begin, end}, storage_bytes);
    return std::pair(moved.begin, moved.end);
  });
}

}  // namespace torchoffload
