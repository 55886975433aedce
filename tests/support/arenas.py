"""arenas.py: pinned arenas for tests, small and without a GPU."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 2 * MIB


def arena_of_chunks(driver: str = "") -> Any:
    """Grows by chunks of 2 MiB, whatever it holds. The "counting" driver can be held, and refuses on request."""
    return testing.PinnedArena(driver=driver, min_chunk_bytes=CHUNK, max_chunk_bytes=CHUNK)


def acquire(arena: Any, nbytes: int) -> Any:
    """A slot, as the engine gets it."""
    while (acquired := arena.try_acquire(nbytes)) is None:
        arena.grow(nbytes)
    return acquired[0]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.001)


def settle(arena: Any) -> None:
    wait_until(lambda: not arena.is_growing, "what is wanted ahead is there")


def exit_code_in_child(check: Callable[[], None]) -> int:
    """Runs `check` in a forked child: 0 if it returns, 1 if it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
