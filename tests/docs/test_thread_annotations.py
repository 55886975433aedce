"""test_thread_annotations.py: what `make lint` says of a lock that is not held, and which kinds of locks there are."""

import pathlib
import re
import subprocess
import sys

import pytest

from places import ROOT

CLANG_TIDY = pathlib.Path(sys.executable).parent / "clang-tidy"
CSRC = ROOT / "csrc"

PROGRAM = """
#include "system/gil.h"
#include "system/mutex.h"

using namespace torchoffload;

class Counter {
 public:
  void add() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    add_one();
  }
  void wait_for_one() EXCLUDES(mutex_, gil) {
    const MutexLock lock(mutex_);
    while (count_ == 0) changed_.wait(mutex_);
  }
  int python_count() REQUIRES(gil) { return python_count_; }
  void called_by_python() { gil.assert_held(); add_one_for_python(); }
OTHERS

 private:
  void add_one() REQUIRES(mutex_) { ++count_; }
  void add_one_for_python() REQUIRES(gil) { ++python_count_; }
  Mutex mutex_;
  CondVar changed_;
  int count_ GUARDED_BY(mutex_) = 0;
  int python_count_ GUARDED_BY(gil) = 0;
};
"""

# The fault of a method, and the words of the message about it.
WRONG = {
    "++count_;": "writing variable 'count_' requires holding mutex 'mutex_'",
    "add_one();": "calling function 'add_one' requires holding mutex 'mutex_'",
    "const MutexLock lock(mutex_); add();": "cannot call function 'add' while mutex 'mutex_' is held",
    "const MutexLock lock(mutex_); const MutexUnlock unlocked(mutex_); ++count_;": "writing variable 'count_' requires",
    "mutex_.lock();": "mutex 'mutex_' is still held at the end of function",
    "changed_.wait(mutex_);": "calling function 'wait' requires holding mutex 'mutex_'",
    "++python_count_;": "writing variable 'python_count_' requires holding Python's lock 'gil'",
    "gil.assert_held(); wait_for_one();": "cannot call function 'wait_for_one' while Python's lock 'gil' is held",
}


def what_lint_says(program: str, tmp_path: pathlib.Path) -> str:
    """Clang-tidy's output with the flags of `make lint`; empty if it accepts the program."""
    flags = re.search(r"^TIDY_FLAGS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert flags is not None
    source = tmp_path / "program.cpp"
    source.write_text(program)
    done = subprocess.run(
        [CLANG_TIDY, "--quiet", f"--config-file={ROOT / '.clang-tidy'}", source, "--", *flags[1].split()[:3]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode != 0 else ""


@pytest.mark.skipif(not CLANG_TIDY.exists(), reason="clang-tidy is not installed beside this Python")
def test_lint_refuses_a_lock_that_is_not_held(tmp_path):
    assert what_lint_says(PROGRAM.replace("OTHERS", ""), tmp_path) == ""
    methods = [f"  void wrong_{number}() {{ {body} }}" for number, body in enumerate(WRONG)]
    first_line = PROGRAM.splitlines().index("OTHERS") + 1
    said = what_lint_says(PROGRAM.replace("OTHERS", "\n".join(methods)), tmp_path).splitlines()
    for number, complaint in enumerate(WRONG.values()):
        of_method = [line for line in said if f"program.cpp:{first_line + number}:" in line]
        assert any(complaint in line and "clang-diagnostic-thread-safety" in line for line in of_method), of_method


def test_every_lock_is_one_that_the_analysis_knows():
    kinds = re.compile(
        r"std::(recursive_|shared_|timed_)?(mutex|lock_guard|unique_lock|scoped_lock|condition_variable)"
    )
    users = {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.[hc]*") if kinds.search(path.read_text())}
    # A generator of random numbers has a mutex of PyTorch's.
    assert users == {"system/mutex.h", "autograd/random_states.cpp"}
