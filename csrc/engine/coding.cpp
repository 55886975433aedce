// Which records are coded for their way over the link, and their counts.
#include <algorithm>
#include <optional>
#include <utility>

#include "engine/engine.h"

namespace torchoffload {

// An external stream may be destroyed while staging memory that was allocated on it is in use, so none is allocated
// there.
bool Engine::prepare_coding(const ContextOptions& options) {
  if (!may_code(options) || !records_.coded.exists() || is_inherited() || Operation::is_shut_down()) return false;
  const bool is_code_ready = records_.coded.prepare_code();
  if (options.compress == Compress::Auto && !records_.lessons.expects_coding()) return false;
  // The GPU's kernels write to the slots themselves.
  if (!records_.slots.require_locked() || !is_code_ready) return false;
  const bool can_allocate = !records_.backend.streams.is_capturing() &&
                            records_.streams.is_lasting(records_.backend.streams.current_stream());
  if (!records_.coded.is_ready() && can_allocate) {
    std::optional<CodedLink::Staging> staging;
    {
      const BlockingSection blocking;
      staging = records_.coded.allocate_staging();
    }
    if (staging && !records_.coded.is_ready()) records_.coded.adopt(std::move(*staging));
  }
  return records_.coded.is_ready();
}

void Engine::release_staging() {
  if (!records_.coded.is_ready() || is_inherited() || records_.ledger.live_tapes() > 0 ||
      records_.backend.streams.is_capturing())
    return;
  const Operation operation;
  for (auto& [bytes, rule] : records_.coded.take_staging()) records_.streams.defer_free(std::move(bytes), rule);
}

void Engine::release_idle() {
  if (is_inherited() || records_.ledger.live_tapes() > 0) return;
  release_staging();
  records_.streams.free_deferred();
}

std::optional<codec::Code> Engine::expected_code(const ContextOptions& options, uint8_t dtype, uint64_t nbytes) const {
  if (!may_code(options)) return std::nullopt;
  const std::optional<codec::Code> code = records_.coded.expected_code(dtype, nbytes);
  const bool is_learned = options.compress == Compress::Auto || (code && codec::is_selective(*code));
  return is_learned && !options.learn ? std::nullopt : code;
}

RecordCode Engine::code_for(const HeldTape& tape, uint8_t dtype, uint64_t nbytes, const Lessons::Known& known) const {
  const ContextOptions& options = tape.context->options;
  const CodingLesson& coding = known.coding;
  const bool is_asked_for = tape.codes && (options.compress == Compress::On || coding.is_quicker);
  const std::optional<codec::Code> code = is_asked_for ? records_.coded.code_of(dtype, nbytes) : std::nullopt;
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
  return ever ? std::max(nbytes, records_.coded.pieces(*ever, nbytes).slot_bytes()) : nbytes;
}

}  // namespace torchoffload
