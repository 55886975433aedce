"""test_older_system.py: what wheels bring for older systems asks for old versions, and does what it stands for."""

import platform
import re
import shutil
import subprocess
import sys

import pytest

from places import ROOT
from torchoffload._core import core

# Calls each of the functions that cmake/wheel/older_system.cpp stands in for. Not std::pmr, which only wheels link so.
PROGRAM = r"""
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

int destroyed = 0;

struct Counted : std::runtime_error {
  using std::runtime_error::runtime_error;
  Counted(const Counted&) = default;
  ~Counted() override { ++destroyed; }
};

__attribute__((noinline)) std::exception_ptr thrown() {
  try {
    throw Counted("planted");
  } catch (...) {
    return std::current_exception();
  }
}

bool an_exception_lives_as_long_as_its_last_copy() {
  auto first = thrown();
  destroyed = 0;
  {
    std::vector<std::exception_ptr> copies(100, first);
    std::exception_ptr moved = std::move(copies.back());
    copies.front() = nullptr;
    first = moved;
  }
  if (destroyed != 0 || !first) return false;
  try {
    std::rethrow_exception(first);
  } catch (const Counted& error) {
    if (std::string(error.what()) != "planted") return false;
  }
  first = nullptr;
  return destroyed == 1;
}

bool streams_and_arrays() {
  std::ostringstream stream;
  stream << "a rather long line, which no string holds within itself: " << 42;
  const std::string text = stream.str();
  if (std::move(stream).str() != text || !stream.str().empty()) return false;
  volatile long none = -1;
  try {
    std::unique_ptr<int[]> array(new int[none]);
    return false;
  } catch (const std::bad_array_new_length&) {
    return text.size() == 59 && text.ends_with(": 42");
  }
}

void* give_back(void* argument) {
  return argument;
}

bool threads() {
  std::mutex mutex;
  std::condition_variable changed;
  int count = 0;
  std::thread other([&] {
    pthread_setname_np(pthread_self(), "older");
    std::unique_lock lock(mutex);
    count = 1;
    changed.notify_one();
    while (count != 2) changed.wait(lock);
  });
  {
    std::unique_lock lock(mutex);
    while (count != 1) changed.wait(lock);
    count = 2;
    changed.notify_one();
  }
  other.join();
  if (!mutex.try_lock()) return false;
  mutex.unlock();
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  if (pthread_attr_setstacksize(&attributes, 1 << 20) != 0) return false;
  pthread_t thread;
  void* given_back = nullptr;
  if (pthread_create(&thread, &attributes, give_back, &mutex) != 0) return false;
  pthread_join(thread, &given_back);
  cpu_set_t cpus;
  sched_getaffinity(0, sizeof cpus, &cpus);
  sigset_t signals;
  sigemptyset(&signals);
  return given_back == &mutex && pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus) == 0 &&
         pthread_sigmask(SIG_BLOCK, &signals, nullptr) == 0;
}

bool waits_until_a_time() {
  using namespace std::chrono_literals;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::unique_lock lock(mutex);
  for (const auto wait : {1ms, 300ms, 999ms}) {
    const auto begin = std::chrono::steady_clock::now();
    if (changed.wait_until(lock, begin + wait, [&] { return is_done; })) return false;
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited < wait || waited > wait + 20s) return false;
  }
  std::thread other([&] {
    const std::lock_guard also(mutex);
    is_done = true;
    changed.notify_one();
  });
  const bool is_told = changed.wait_for(lock, 60s, [&] { return is_done; });
  lock.unlock();
  other.join();
  return is_told && gettid() == getpid();
}

}  // namespace

extern "C" int failed() {
  if (!an_exception_lives_as_long_as_its_last_copy()) return 1;
  if (!streams_and_arrays()) return 2;
  if (!threads()) return 3;
  if (!waits_until_a_time()) return 4;
  return 0;
}
"""
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}


def symbols(library, *options: str) -> str:
    return subprocess.run(["nm", *options, str(library)], capture_output=True, text=True, check=True).stdout


def newer_than_allowed(library) -> set[str]:
    """The symbols that a library needs in versions that manylinux_2_28 does not have."""
    listed = symbols(library, "-D", "-u")
    wanted = re.findall(r"(\w+)@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", listed)
    return {name for name, kind, version in wanted if tuple(map(int, version.split("."))) > NEWEST[kind]}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The program as a library, beside nothing and beside what wheels bring."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("takes g++ on x86-64")
    folder = tmp_path_factory.mktemp("older")
    (folder / "program.cpp").write_text(PROGRAM)
    compiler = ["g++", "-std=c++20", "-O2", "-fPIC", "-shared", str(folder / "program.cpp")]
    alone, beside = folder / "alone.so", folder / "beside.so"
    subprocess.run([*compiler, "-o", str(alone)], check=True)
    subprocess.run([*compiler, str(ROOT / "cmake" / "wheel" / "older_system.cpp"), "-o", str(beside)], check=True)
    return alone, beside


def test_what_wheels_bring_asks_for_old_versions_alone(compiled):
    alone, beside = compiled
    if not newer_than_allowed(alone):
        pytest.skip("this system is itself no newer than manylinux_2_28")
    assert newer_than_allowed(beside) == set()


def test_what_the_core_needs_of_newer_systems_is_brought(compiled):
    brought = {line.split()[-1] for line in symbols(compiled[1], "--defined-only").splitlines()}
    from_memory_resource = {name for name in newer_than_allowed(core.__file__) if "St3pmr" in name}
    assert newer_than_allowed(core.__file__) - from_memory_resource - brought == set()


def test_what_wheels_bring_does_what_it_stands_for(compiled):
    program = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).failed())"
    for library in compiled:
        assert subprocess.run([sys.executable, "-c", program, str(library)], timeout=60).returncode == 0
