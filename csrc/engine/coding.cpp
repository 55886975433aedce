// Which records are coded for their way over the link, and their counts.
#include <algorithm>
#include <optional>
#include <utility>

#include "engine/engine.h"

namespace torchoffload {

// An external stream may be destroyed while staging memory that was allocated on it is in use, so none is allocated
// there.
bool Engine::prepare_coding(const ContextOptions& options) {
  if (!may_code(options) || !coded_.exists() || is_inherited() || Operation::is_shut_down()) return false;
  const bool is_code_ready = coded_.prepare_code();
  if (options.compress == Compress::Auto && !lessons_.expects_coding()) return false;
  // The GPU's kernels write to the slots themselves.
  if (!slots_.require_locked() || !is_code_ready) return false;
  const bool can_allocate = !backend_.streams.is_capturing() && streams_.is_lasting(backend_.streams.current_stream());
  if (!coded_.is_ready() && can_allocate) {
    std::optional<CodedLink::Staging> staging;
    {
      const BlockingSection blocking;
      staging = coded_.allocate_staging();
    }
    if (staging && !coded_.is_ready()) coded_.adopt(std::move(*staging));
  }
  return coded_.is_ready();
}

void Engine::release_staging() {
  if (!coded_.is_ready() || is_inherited() || ledger_.live_tapes() > 0 || backend_.streams.is_capturing()) return;
  const Operation operation;
  for (auto& [bytes, rule] : coded_.take_staging()) streams_.retire(std::move(bytes), rule);
}

void Engine::release_idle() {
  if (is_inherited() || ledger_.live_tapes() > 0) return;
  release_staging();
  streams_.reap();
}

std::optional<codec::Code> Engine::expected_code(const ContextOptions& options, uint8_t dtype, uint64_t nbytes) const {
  if (!may_code(options)) return std::nullopt;
  const std::optional<codec::Code> code = coded_.expected_code(dtype, nbytes);
  const bool is_learned = options.compress == Compress::Auto || (code && codec::is_selective(*code));
  return is_learned && !options.learn ? std::nullopt : code;
}

RecordCode Engine::code_for(const TapeInfo& tape, uint8_t dtype, uint64_t nbytes, const Lessons::Known& known) const {
  const ContextOptions& options = tape.context->options;
  const CodingLesson& coding = known.coding;
  const bool is_asked_for = tape.codes && (options.compress == Compress::On || coding.is_quicker);
  const std::optional<codec::Code> code = is_asked_for ? coded_.code_of(dtype, nbytes) : std::nullopt;
  if (!code) return {};
  const bool is_selective = codec::is_selective(*code);
  if (is_selective && !coding.exceptions) return {.candidate = options.learn ? code : std::nullopt};
  const bool may_be_in_vain = options.compress == Compress::On && !is_selective;
  if (coding.has_too_many_exceptions() && !may_be_in_vain) return {};
  return {.used = code, .tag = known.code_tag};
}

// Otherwise, in the first step that codes the record, it would not fit in the slot that it had in the step before.
uint64_t Engine::slot_bytes_for(const ContextOptions& options, uint8_t dtype, uint64_t nbytes,
                                const RecordCode& code) const {
  const std::optional<codec::Code> ever = code.used ? code.used : expected_code(options, dtype, nbytes);
  return ever ? std::max(nbytes, coded_.pieces(*ever, nbytes).slot_bytes()) : nbytes;
}

void Engine::count_coded(RecordId id, codec::Code code) {
  const uint64_t nbytes = ledger_.record(id).nbytes();
  TapeRow& row = this->row(ledger_.record(id).tape);
  count(row, &TapeRow::records_coded, 1);
  count(row, &TapeRow::bytes_coded, nbytes);
  count(row, &TapeRow::bytes_coded_on_link, coded_.pieces(code, nbytes).copied_bytes());
}

void Engine::learn_from_slot(const HeldRecord& held, const Ledger::DroppedHandle& dropped) {
  if (is_inherited()) return;
  const auto& [used, candidate, tag] = held.code;
  if (!used && !candidate) return;
  const std::optional<HeldSlot> here = slots_.try_hold(held.slot);
  if (!here) return;  // on a disk
  const std::byte* const address = here->slot().address;
  if (candidate && codec::looks_codable(*candidate, address, dropped.nbytes))
    lessons_.learn_suits_candidate(dropped.tape, held.number);
  if (!used) return;
  const auto found = codec::sample_exceptions(address, coded_.pieces(*used, dropped.nbytes), tag);
  if (!found || found->seen == 0) return;
  lessons_.learn_exceptions(dropped.tape, held.number,
                            static_cast<double>(found->count) / static_cast<double>(found->seen));
  TapeRow& row = this->row(dropped.tape);
  count(row, &TapeRow::blocks_seen, found->seen);
  count(row, &TapeRow::blocks_excepted, found->count);
  if (ModuleRow* const module = tapes_[dropped.tape.index].context->row_of(held.module); module != nullptr) {
    module->blocks_seen += found->seen;
    module->blocks_excepted += found->count;
  }
}

}  // namespace torchoffload
