"""What runs short for a while: the same on both tiers, by the table in design.md ("Failures")."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchoffload
from places import SUPPORT

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="faults are injected into the test build alone"
)


@pytest.mark.parametrize("tier", ["disk", "spill"])
@pytest.mark.parametrize("shortage", ["descriptors", "threads", "room"])
def test_tensors_are_kept_while_something_runs_short(shortage: str, tier: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "shortage_programs.py"), shortage, tier, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")


NAMES = [b"plain", b"\xe9t\xe9", "新 %s {x}\n".encode(), b"\xff\xfe", b"a" * 250]


@pytest.mark.parametrize("name", NAMES, ids=["plain", "latin", "unicode", "no text", "long"])
def test_a_directory_may_have_any_name(name: bytes, tmp_path: Path):
    directory = os.fsdecode(os.path.join(os.fsencode(tmp_path), name))
    os.mkdir(directory)
    before = torchoffload.stats().bytes_offloaded
    x = torch.randn(64, 64, requires_grad=True)
    context = torchoffload.OffloadActivations(tier="disk", disk_dir=[directory], min_offload_size=0)
    with context:
        y = (x * 2).exp().exp()
    y.sum().backward()
    assert torchoffload.stats().bytes_offloaded > before


@pytest.mark.parametrize("name", NAMES, ids=["plain", "latin", "unicode", "no text", "long"])
def test_a_failure_names_any_directory(name: bytes, tmp_path: Path):
    from torchoffload._C_testing import testing

    directory = os.fsdecode(os.path.join(os.fsencode(tmp_path), name))
    os.mkdir(directory)
    x = torch.randn(64, 64, requires_grad=True)
    testing.inject_io_fault("reserve", errno=errno.ENOSPC)
    try:
        with (
            pytest.warns(UserWarning, match="No space left on device") as told,
            torchoffload.OffloadActivations(tier="disk", disk_dir=directory, min_offload_size=0),
        ):
            y = (x * 2).exp().exp()
        y.sum().backward()
    finally:
        testing.clear_io_faults()
    assert testing.quoted(os.fsencode(directory)) in str(told[0].message)


def test_a_name_is_told_as_it_is_where_it_can_be_printed():
    from torchoffload._C_testing import testing

    told = {
        b"/data/plain": "'/data/plain'",
        b"\xe9t\xe9": r"'\xe9t\xe9'",
        "新 %s {x}\n".encode(): r"'新 %s {x}\x0a'",
        b"\xed\xa0\x80\xc0\x80\xf4\x90\x80\x80\xe6\x96": r"'\xed\xa0\x80\xc0\x80\xf4\x90\x80\x80\xe6\x96'",
        "a😀é\x7f".encode(): r"'a😀é\x7f'",
    }
    for name, expected in told.items():
        assert testing.quoted(name) == expected
