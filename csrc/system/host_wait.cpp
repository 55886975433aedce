#include "system/host_wait.h"

#include <unistd.h>

#include <atomic>

#include "core/mutant.h"

namespace torchoffload {
namespace {

std::atomic<AskInterrupted> ask_interrupted{nullptr};

std::string seconds(std::chrono::milliseconds duration) {
  return std::to_string((duration.count() + 999) / 1000) + " s";
}

}  // namespace

#ifdef TORCHOFFLOAD_TESTING
WaitLimits wait_limits;
#endif

void set_ask_interrupted(AskInterrupted ask) { ask_interrupted = ask; }

void tell_on_stderr(const std::string& text) {
  const std::string line = "torchoffload: " + text + "\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());  // one call: one line
}

bool HostWait::is_to_be_told() const {
  return !has_told_ && std::chrono::steady_clock::now() - begin_ >= wait_limits.until_told;
}

bool HostWait::look_around(const std::string& told) {
  if (!told.empty()) {
    has_told_ = true;
    tell_on_stderr("waited " + seconds(wait_limits.until_told) + " for " + told +
                   ", and goes on waiting. Does the disk answer? Ctrl-C ends the wait");
  }
  const AskInterrupted ask = ask_interrupted;
  return ask != nullptr && ask() && !mutated(Mutant::InterruptEndsWait);
}

std::chrono::steady_clock::time_point ExitWait::deadline() {
  static const auto known = std::chrono::steady_clock::now() + wait_limits.at_exit;
  return known;
}

void ExitWait::tell(const char* what) {
  tell_on_stderr("waited " + seconds(wait_limits.at_exit) + " for " + what +
                 " at the end of the process, and leaves it behind");
}

}  // namespace torchoffload
