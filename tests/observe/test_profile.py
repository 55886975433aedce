"""profile(): exact stalls, rates and memory on the simulated device, counts on disk, and both on CUDA."""

import json
import threading
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import settled_stats
from timed_steps import (
    BACKWARD_S,
    COPY_S,
    FORWARD_S,
    LEAST_MEMORY,
    RECORD_BYTES,
    Layer,
    advance,
    forward,
    scope_with_a_link,
    step,
)
from torchoffload import EntryKind
from torchoffload._observe.units import human_bytes

SIMULATED = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")


@pytest.fixture
def scope(device_under_test: Device):
    torchoffload.reset_stats()
    with scope_with_a_link(device_under_test) as simulation:
        yield simulation


def exactly(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


# ---- times ----


@SIMULATED
def test_with_no_windows_computing_stands_still_for_each_copy(device_under_test: Device, scope):
    with torchoffload.profile() as profile:
        step(device_under_test, 4, **LEAST_MEMORY)
    total = profile.total
    assert total.window_wait_s == exactly(4 * COPY_S)
    assert total.reload_wait_s == exactly(4 * COPY_S)
    assert total.stall_s == exactly(8 * COPY_S)


@SIMULATED
def test_rates_and_use_of_the_link_each_way(device_under_test: Device, scope):
    with torchoffload.profile() as profile:
        step(device_under_test, 4, **LEAST_MEMORY)
    out, back = profile.total.out, profile.total.back
    link_bytes_per_s = RECORD_BYTES / COPY_S
    for way in (out, back):
        assert (way.copies, way.nbytes) == (4, 4 * RECORD_BYTES)
        assert way.busy_s == exactly(4 * COPY_S)
        assert way.bytes_per_s == exactly(link_bytes_per_s)
        assert way.link_use() == exactly(way.link_use(link_bytes_per_s))
        assert way.link_use(2 * link_bytes_per_s) == exactly(way.link_use() / 2)
    # A copy goes once the next layer has computed; the last one goes at the context's exit.
    assert out.link_use() == exactly(4 * COPY_S / (4 * COPY_S + 2 * FORWARD_S))
    assert back.link_use() == exactly(4 * COPY_S / (4 * COPY_S + 3 * BACKWARD_S))


@SIMULATED
def test_a_window_keeps_the_link_busy_and_shortens_the_stalls(device_under_test: Device, scope):
    with torchoffload.profile() as profile:
        step(device_under_test, 6, offload_window_bytes=2 * RECORD_BYTES, reload_window_bytes=2 * RECORD_BYTES)
    out = profile.total.out
    assert out.span_s == exactly(6 * COPY_S)
    assert out.link_use() == exactly(1.0)
    # The copies of records 2, 3, 4 and, at the exit, 5 find the window full.
    assert profile.total.window_wait_s == exactly(0.5e-3 + 0.75e-3 + 0.75e-3 + 1e-3)
    fill = [entry.offload_window_bytes for entry in profile.entries if entry.kind is EntryKind.WINDOW_WAIT]
    assert fill == [3 * RECORD_BYTES] * 4


@SIMULATED
def test_a_link_that_keeps_up_stalls_nothing_in_forward(device_under_test: Device, scope):
    from torchoffload._C_testing import testing

    testing.set_link(0, 100 * RECORD_BYTES / FORWARD_S)
    with torchoffload.profile() as profile:
        step(device_under_test, 6, offload_window_bytes=10 * RECORD_BYTES, reload_window_bytes=0)
    assert profile.total.window_wait_s == 0
    assert profile.total.out.link_use() < 0.05


@SIMULATED
def test_computing_stands_still_for_copies_that_backward_overtakes(device_under_test: Device, scope):
    # Backward begins while all copies are on their way, and uses the last record's source. Nobody else asks for it, so
    # it is given up, and its memory may be handed on only after its copy, which is the last of all.
    with torchoffload.profile() as profile:
        step(device_under_test, 3, offload_window_bytes=10 * RECORD_BYTES, reload_window_bytes=10 * RECORD_BYTES)
    copies_end_s = 2 * FORWARD_S + 3 * COPY_S
    assert profile.total.drop_wait_s == exactly(copies_end_s - 3 * FORWARD_S)
    assert profile.total.stall_s == profile.total.drop_wait_s
    assert [entry.record for entry in profile.entries if entry.kind is EntryKind.DROP_WAIT] == [2]


@SIMULATED
def test_each_tape_has_times_of_its_own(device_under_test: Device, scope):
    with torchoffload.profile() as profile:
        for layers in (2, 3):
            step(device_under_test, layers, **LEAST_MEMORY)
    first, second = profile.tapes
    assert (first.out.copies, second.out.copies) == (2, 3)
    assert (first.window_wait_s, second.reload_wait_s) == (exactly(2 * COPY_S), exactly(3 * COPY_S))
    assert second.tape == first.tape + 1
    assert first.device == second.device
    # Between them lies the first one's backward, in which nothing goes out.
    assert profile.total.out.span_s == exactly(first.out.span_s + second.out.span_s)
    assert profile.total.stall_s == exactly(first.stall_s + second.stall_s)


@SIMULATED
def test_tapes_that_overlap_share_the_time(device_under_test: Device, scope):
    with torchoffload.profile() as profile:
        with device_under_test.context(**LEAST_MEMORY):
            outer = forward(device_under_test, 2)
            with device_under_test.context(**LEAST_MEMORY):
                inner = forward(device_under_test, 3)
            outer = outer + forward(device_under_test, 2)
        (outer + inner).backward()
    outside, inside = profile.tapes
    assert (outside.out.copies, inside.out.copies) == (4, 3)
    assert outside.out.span_s > inside.out.span_s
    assert profile.total.out.span_s == exactly(outside.out.span_s)


@SIMULATED
def test_the_entries_of_one_record_tell_its_life(device_under_test: Device, scope):
    with torchoffload.profile() as profile:
        step(device_under_test, 1, **LEAST_MEMORY)
    kinds = ["ready", "copy_out", "window_wait", "closed", "needed", "copy_in", "reload_wait"]
    assert [entry.kind.value for entry in profile.entries] == kinds
    ready, copy_out, window_wait, closed, needed, copy_in, reload_wait = profile.entries
    assert {entry.tape for entry in profile.entries} == {ready.tape}
    assert [entry.nbytes for entry in profile.entries if entry is not closed] == [RECORD_BYTES] * 6
    assert not any(entry.is_kept for entry in profile.entries)
    assert ready.begin_s == ready.end_s == copy_out.begin_s == window_wait.begin_s
    assert copy_out.end_s == window_wait.end_s == closed.begin_s == exactly(ready.begin_s + COPY_S)
    assert needed.begin_s == copy_in.begin_s == reload_wait.begin_s
    assert copy_in.duration_s == exactly(COPY_S)
    assert ready.begin_s >= 0


@SIMULATED
def test_times_begin_with_each_profile(device_under_test: Device, scope):
    step(device_under_test, 1)  # the device is known from here on
    advance(5.0)
    with torchoffload.profile() as profile:
        step(device_under_test, 1, **LEAST_MEMORY)
    assert profile.entries[0].begin_s == exactly(FORWARD_S)


@SIMULATED
def test_a_timed_step_is_learned_the_same_inside_a_profile(device_under_test: Device, scope):
    from torchoffload._C_testing import testing

    def rows() -> list[dict[str, int]]:
        testing.forget_learned()
        torchoffload.reset_stats()
        for _ in range(4):
            step(device_under_test, 12, learn=True, offload_window_bytes=None, reload_window_bytes=None)
        return [tape.records_kept for tape in settled_stats().tapes]

    plain = rows()
    with torchoffload.profile():
        profiled = rows()
    testing.forget_learned()
    assert profiled == plain
    assert plain[-1]


# ---- memory ----


@SIMULATED
def test_memory_at_the_loss_and_at_its_peak(device_under_test: Device, scope):
    with torchoffload.profile() as profile:
        with device_under_test.context(**LEAST_MEMORY):
            loss = forward(device_under_test, 8)
        at_loss_bytes = scope.allocated_bytes()
        loss.backward()
    (tape,) = profile.tapes
    assert tape.loss_device_bytes == profile.total.loss_device_bytes == at_loss_bytes
    assert at_loss_bytes < tape.peak_device_bytes <= scope.peak_bytes()


@SIMULATED
def test_what_is_said_to_be_freed_at_the_loss_is_what_the_device_holds_less(device_under_test: Device, scope):
    loss = forward(device_under_test, 8)
    stock_bytes = scope.allocated_bytes()
    del loss
    with device_under_test.context(**LEAST_MEMORY):
        loss = forward(device_under_test, 8)
    ours_bytes = scope.allocated_bytes()
    assert torchoffload.stats().tapes[-1].bytes_away == stock_bytes - ours_bytes == 7 * RECORD_BYTES
    assert "freed at the loss        112.0 KiB less device memory than without us" in torchoffload.report()
    del loss


def test_a_tape_that_did_not_close_inside_has_no_memory_at_the_loss():
    from torchoffload._observe.timing import sum_up

    assert sum_up([]).loss_device_bytes is None
    assert sum_up([]).out.link_use() == sum_up([]).out.bytes_per_s == 0


# ---- the report ----


@SIMULATED
def test_the_report_tells_of_the_latest_profile_until_a_reset(device_under_test: Device, scope):
    with torchoffload.profile():
        step(device_under_test, 4, **LEAST_MEMORY)
    text = torchoffload.report()
    assert "in the latest profile(), 1 tapes:" in text
    assert "0.008 s in all: 0.004 s for a full window, 0.004 s for reloads" in text
    assert "rate out" in text
    assert "at the loss" in text
    assert len(text.splitlines()) <= 30
    torchoffload.reset_stats()
    assert "latest profile()" not in torchoffload.report()


# ---- entering and leaving ----


def test_only_one_profile_is_open_at_a_time():
    refused: list[str] = []

    def another() -> None:
        with pytest.raises(RuntimeError, match="open already in this process") as raised, torchoffload.profile():
            pass
        refused.append(str(raised.value))

    with torchoffload.profile():
        another()
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
    assert len(refused) == 2
    with torchoffload.profile() as afterwards:
        pass
    assert afterwards.counts.records_offloaded == 0


def test_a_profile_is_entered_once():
    profile = torchoffload.profile()
    with pytest.raises(RuntimeError, match="not entered yet"):
        _ = profile.counts
    with profile:
        with pytest.raises(RuntimeError, match="leave its `with` block first"):
            _ = profile.has_times
        with pytest.raises(RuntimeError, match="cannot be entered, it is still open"):
            profile.__enter__()
    with pytest.raises(RuntimeError, match="each `with` takes a new"):
        profile.__enter__()


@SIMULATED
def test_a_profile_prints_a_summary(device_under_test: Device, scope):
    profile = torchoffload.profile()
    assert str(profile) == repr(profile) == "<torchoffload profile: it was not entered yet>"
    with profile:
        step(device_under_test, 4, **LEAST_MEMORY)
    moved = f"{human_bytes(4 * RECORD_BYTES)} out, {human_bytes(4 * RECORD_BYTES)} back"
    assert repr(profile) == f"<torchoffload profile: {moved}, computing waited 0.008 s>"
    names = [line[:24].strip() for line in str(profile).splitlines()[1:]]
    assert names == ["offloaded", "reloaded", "compute stood still", "rate out", "rate back", "device memory"]
    assert "0.008 s in all: 0.004 s for a full window, 0.004 s for reloads" in str(profile)


def test_an_exception_inside_ends_the_profile(device_under_test: Device, scope):
    def failing_step() -> None:
        step(device_under_test, 2, **LEAST_MEMORY)
        raise ZeroDivisionError

    profile = torchoffload.profile()
    with pytest.raises(ZeroDivisionError), profile:
        failing_step()
    assert profile.counts.records_offloaded == 2
    with torchoffload.profile():
        pass


def test_counts_are_those_of_the_profile_alone(device_under_test: Device, scope):
    step(device_under_test, 3, **LEAST_MEMORY)
    with torchoffload.profile() as profile:
        step(device_under_test, 2, **LEAST_MEMORY)
    counts = profile.counts
    assert (counts.records_offloaded, counts.bytes_offloaded) == (2, 2 * RECORD_BYTES)
    assert counts.bytes_reloaded == 2 * RECORD_BYTES
    assert counts.records_kept == {}
    assert profile.stats.records_offloaded == 5


def test_a_reset_inside_starts_the_counts_anew(device_under_test: Device, scope):
    step(device_under_test, 3)
    with torchoffload.profile() as profile:
        torchoffload.reset_stats()
        step(device_under_test, 1)
    assert profile.counts.records_offloaded == 1


@pytest.mark.devices("disk")
def test_the_disk_tier_tells_no_time_and_says_so(device_under_test: Device, scope, tmp_path):
    with torchoffload.profile() as profile:
        step(device_under_test, 2)
    assert not profile.has_times
    for ask in (lambda: profile.total, lambda: profile.tapes, lambda: profile.entries):
        with pytest.raises(RuntimeError, match=r"no times.*the disk tier .* does not. What moved is in Profile.counts"):
            ask()
    with pytest.raises(RuntimeError, match="no times"):
        profile.export_timeline(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
    assert profile.counts.records_offloaded == 2
    assert str(profile).splitlines()[-1].startswith("  no times: ")
    assert repr(profile).endswith(" back, no times>")
    assert "latest profile()" not in torchoffload.report()


# ---- torch.profiler ----


@pytest.mark.devices("disk")
def test_torch_profiler_shows_what_the_hooks_do(device_under_test: Device, scope):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(device_under_test, 3, **LEAST_MEMORY)
    seen = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("torchoffload")}
    assert seen == {
        "torchoffload::pack": 3,
        "torchoffload::unpack": 3,
        f"torchoffload::offload {RECORD_BYTES}": 3,
        f"torchoffload::reload {RECORD_BYTES}": 3,
    }


# ---- CUDA ----


@pytest.mark.devices("cuda")
def test_on_cuda_times_are_the_devices(device_under_test: Device, scope, tmp_path):
    width = 2048
    nbytes = width * width * 4
    x = torch.ones(width, width, device="cuda", requires_grad=True)

    def hidden() -> torch.Tensor:
        y = x
        for _ in range(8):
            y = Layer.apply(y, False)
        return y

    with torchoffload.profile() as profile:
        with device_under_test.context(**LEAST_MEMORY):
            loss = hidden().sum()
        at_loss_bytes = torch.cuda.memory_allocated()
        loss.backward()
    (tape,) = profile.tapes
    for way in (tape.out, tape.back):
        assert (way.copies, way.nbytes) == (8, 8 * nbytes)
        assert way.bytes_per_s > 1e9
        assert 0 < way.link_use() <= 1.01  # other processes may take the link meanwhile
    assert tape.window_wait_s > 0.5 * tape.out.busy_s, "nothing hides the copies"
    assert tape.reload_wait_s > 0.5 * tape.back.busy_s
    assert tape.loss_device_bytes == at_loss_bytes
    assert tape.device.startswith("cuda:")
    profile.export_timeline(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "rate back" in torchoffload.report()
    assert "memory of cuda:" in torchoffload.report()


@pytest.mark.devices("cuda")
def test_a_profile_is_not_entered_under_a_capture(device_under_test: Device, scope):
    step(device_under_test, 1)  # there is an engine
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
        pytest.raises(RuntimeError, match="while a CUDA graph is being captured"),
    ):
        torchoffload.profile().__enter__()
    with torchoffload.profile() as afterwards:
        step(device_under_test, 1, **LEAST_MEMORY)
    assert afterwards.total.out.copies == 1
