"""export_timeline(): the trace's tracks, names, arguments and counters."""

import json
from collections import Counter

import pytest

import torchoffload
from devices import Device
from timed_steps import COPY_S, RECORD_BYTES, scope_with_a_link, step

SIMULATED = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")


@pytest.fixture
def scope(device_under_test: Device):
    torchoffload.reset_stats()
    with scope_with_a_link(device_under_test) as simulation:
        yield simulation


@SIMULATED
def test_the_trace_has_a_track_for_each_stream_and_counters(device_under_test: Device, scope, tmp_path):
    with torchoffload.profile() as profile:
        step(device_under_test, 3, offload_window_bytes=0, reload_window_bytes=RECORD_BYTES)
    profile.export_timeline(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(tracks) == ["compute_stream: waits", "offload_stream: copies", "reload_stream: copies"]
    spans = [event for event in events if event["ph"] == "X"]
    on_track = Counter(event["tid"] for event in spans)
    assert on_track[tracks["offload_stream: copies"]] == 3
    assert on_track[tracks["reload_stream: copies"]] == 3
    assert on_track[tracks["compute_stream: waits"]] == sum(entry.kind.endswith("wait") for entry in profile.entries)
    for event in spans:
        assert event["dur"] >= 0
        assert event["args"].keys() >= {"tape", "record", "bytes", "why"}
    first = next(event for event in spans if event["cat"] == "copy_out")
    assert first["name"] == "offload record 0 (16.0 KiB)"
    assert first["args"]["bytes"] == RECORD_BYTES
    assert first["args"]["GB/s"] == pytest.approx(RECORD_BYTES / COPY_S / 1e9, abs=0.01)
    assert first["dur"] == pytest.approx(COPY_S * 1e6)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"offload window", "reload window", "device memory"}
    assert [event["name"] for event in events if event["ph"] == "i"] == [f"tape {profile.tapes[0].tape} closed"]


@SIMULATED
def test_the_trace_says_which_reloads_were_ahead_of_their_use(device_under_test: Device, scope, tmp_path):
    with torchoffload.profile() as profile:
        step(device_under_test, 3, offload_window_bytes=0, reload_window_bytes=2 * RECORD_BYTES)
    profile.export_timeline(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    why = {event["args"]["record"]: event["args"]["why"] for event in events if event.get("cat") == "copy_in"}
    assert why == {2: "asked for", 1: "ahead of its use", 0: "ahead of its use"}
