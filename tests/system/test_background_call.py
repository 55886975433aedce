"""BackgroundCall: begun once and without a wait, waited for on request, stopped between its parts, and fork-safe."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from arenas import exit_code_in_child, testing, wait_until


@pytest.fixture
def call() -> Iterator[Any]:
    """Its call waits between two parts until `let_return`."""
    made = testing.BackgroundCall()
    yield made
    made.let_return()


def test_it_is_begun_once_and_nobody_waits_for_it(call: Any):
    assert call.parts_done == 0
    for _ in range(3):
        call.begin()
    wait_until(lambda: call.parts_done == 1, "the first part is done")
    call.begin()
    call.let_return()
    call.await_end()
    call.begin()
    call.await_end()
    assert call.parts_done == 2


def test_its_thread_takes_no_signals(call: Any):
    before = set(os.listdir("/proc/self/task"))
    call.begin()
    wait_until(lambda: call.parts_done == 1, "the first part is done")
    names = {}
    for task in set(os.listdir("/proc/self/task")) - before:
        with open(f"/proc/self/task/{task}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        names[fields["Name"].strip()] = int(fields["SigBlk"], 16)
    assert all(names["tested-call"] & 1 << (number - 1) for number in (2, 10, 15))  # SIGINT, SIGUSR1, SIGTERM


def test_stop_waits_for_the_part_under_way_and_no_other_follows(call: Any):
    call.begin()
    wait_until(lambda: call.parts_done == 1, "the first part is done")
    stopping = threading.Thread(target=call.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    call.let_return()
    stopping.join()
    call.begin()
    call.await_end()
    assert call.parts_done == 1


def test_what_was_stopped_before_is_not_begun(call: Any):
    call.stop()
    call.begin()
    call.await_end()
    assert call.parts_done == 0


def test_a_child_forked_meanwhile_waits_for_nothing_and_begins_nothing(call: Any):
    call.begin()
    wait_until(lambda: call.parts_done == 1, "the first part is done")
    other = testing.BackgroundCall()

    def check() -> None:
        for inherited in (call, other):
            inherited.begin()
            inherited.await_end()
            inherited.stop()
        assert (call.parts_done, other.parts_done) == (1, 0)
        mine = testing.BackgroundCall()
        mine.begin()
        mine.let_return()
        mine.await_end()
        assert mine.parts_done == 2

    assert exit_code_in_child(check) == 0
