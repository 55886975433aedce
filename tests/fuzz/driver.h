// driver.h: what the programs of tests/fuzz share: their options, the loop over seeds, and what was covered.
//
//     PROGRAM [--seconds N] [--seed S]
//
// Rounds are played from seed S on for N seconds, at least one. A failure names the seed of its round, and
// `--seed THAT --seconds 0` plays that round alone. Where threads take part, a round is its seed's only as far as the
// system schedules them alike.
// Not handled:   a thread that hangs is not named; the round is, when it lasts far longer than all rounds should.
#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace torchoffload::fuzz {

inline void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

struct Options {
  double seconds = 5;
  uint64_t seed = 1;
};

inline Options parse_options(int argc, char** argv) {
  Options options;
  for (int next = 1; next + 1 < argc; next += 2) {
    if (std::strcmp(argv[next], "--seconds") == 0) {
      options.seconds = std::atof(argv[next + 1]);
    } else if (std::strcmp(argv[next], "--seed") == 0) {
      options.seed = std::strtoull(argv[next + 1], nullptr, 10);
    } else {
      argc = 0;
    }
  }
  if (argc % 2 == 0) {
    std::fprintf(stderr, "usage: %s [--seconds N] [--seed S]\n", argv[0]);
    std::exit(2);
  }
  return options;
}

// How often each thing happened. Names are literals.
class Coverage {
 public:
  void saw(std::string_view what, uint64_t count = 1) { counts_[what] += count; }
  void add(const Coverage& other) {
    for (const auto& [what, count] : other.counts_) saw(what, count);
  }
  std::string text() const {
    std::string text;
    for (const auto& [what, count] : counts_) text.append("  ").append(what).append(" ") += std::to_string(count);
    return text;
  }
  // Those of `wanted` that never happened.
  std::string missing(const std::vector<std::string_view>& wanted) const {
    std::string text;
    for (const std::string_view what : wanted) {
      if (!counts_.contains(what)) text.append("  ").append(what);
    }
    return text;
  }

 private:
  std::map<std::string_view, uint64_t> counts_;
};

// The text for a round that hangs, ready for a signal's handler.
inline char hanging[160];
extern "C" inline void name_the_round(int) {
  (void)!write(STDERR_FILENO, hanging, std::strlen(hanging));
  _exit(3);
}

// `play(seed, coverage)` is a round; it throws where something is wrong. `wanted`: what has to happen in a run of at
// least kJudgedSeconds, or the program shows less than it says. Returns the exit status.
template <typename Play>
int drive(const char* program, const Options& options, const std::vector<std::string_view>& wanted, Play play) {
  constexpr double kJudgedSeconds = 50;
  constexpr unsigned kGraceSeconds = 300;  // a sanitizer on a busy machine is slow
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(options.seconds);
  std::signal(SIGALRM, name_the_round);
  Coverage coverage;
  uint64_t seed = options.seed;
  do {
    std::snprintf(hanging, sizeof hanging, "%s: the round of seed %llu hangs\n", program,
                  static_cast<unsigned long long>(seed));
    alarm(kGraceSeconds);
    try {
      play(seed, coverage);
    } catch (const std::exception& error) {
      std::printf("%s: %s\n  again: %s --seed %llu --seconds 0\n", program, error.what(), program,
                  static_cast<unsigned long long>(seed));
      return 1;
    }
    ++seed;
  } while (Clock::now() < end);
  alarm(0);
  std::printf("%s: %llu rounds, every check held;%s\n", program, static_cast<unsigned long long>(seed - options.seed),
              coverage.text().c_str());
  const std::string missing = coverage.missing(wanted);
  if (missing.empty() || options.seconds < kJudgedSeconds) return 0;
  std::printf("%s: never happened:%s\n", program, missing.c_str());
  return 1;
}

}  // namespace torchoffload::fuzz
