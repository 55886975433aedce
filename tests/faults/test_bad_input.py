"""What a user can do wrong at run time: a clear error, nothing lost, later steps right.

Wrong types and values of options are in test_options.py.
"""

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Live, Run, assert_same_gradients, settled


def step_is_right(device: Device) -> None:
    """The next step, after whatever went wrong, is bit-equal, and moves."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x.exp().exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device, moved_bytes=8192)


def other_tier(device: Device) -> torchoffload.OffloadActivations:
    if device.tier == "disk":
        return torchoffload.OffloadActivations(tier="host")
    return torchoffload.OffloadActivations(tier="disk", disk_dir=str(device.directory))


def test_leaving_the_context_twice(device_under_test: Device):
    with device_under_test.scope():
        context = device_under_test.context()
        with context:
            pass
        with pytest.raises(RuntimeError, match="left more often than entered"):
            context.__exit__(None, None, None)
        outer = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with outer:
            with pytest.raises(RuntimeError, match="left more often than entered"):
                context.__exit__(None, None, None)
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None, "a stranger's hooks stay"
    step_is_right(device_under_test)


def test_leaving_on_another_thread(device_under_test: Device):
    errors = []

    def leave(context: torchoffload.OffloadActivations) -> None:
        try:
            context.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with device_under_test.scope():
        context = device_under_test.context()
        with context:
            thread = threading.Thread(target=leave, args=(context,))
            thread.start()
            thread.join()
    assert len(errors) == 1
    assert "on this thread" in errors[0]
    step_is_right(device_under_test)


@pytest.mark.devices("simulated-late", "privateuseone", "cuda")
def test_nested_contexts_of_different_tiers(device_under_test: Device):
    with device_under_test.scope():
        x = torch.ones(32, 32, device=device_under_test.torch_device, requires_grad=True)
        with device_under_test.context():
            y = x.exp()
            with pytest.raises(RuntimeError, match="tier"), other_tier(device_under_test):
                pytest.fail("entered")
            z = y.exp()
        with other_tier(device_under_test), pytest.raises(RuntimeError, match="tier"), device_under_test.context():
            pytest.fail("entered")
        z.sum().backward()
    step_is_right(device_under_test)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_no_accelerator_with_the_default_tier(tmp_path: Path):
    for options in ({}, {"use_streams": False}, {"use_pin_memory": False}, {"offload_window_bytes": 0}):
        context = torchoffload.OffloadActivations(**options)
        with pytest.raises(RuntimeError, match='tier="disk"'), context:
            pytest.fail("entered")
    step_is_right(Device("disk", tmp_path))


def test_a_loss_of_someone_elses_tensor_type_is_not_ours(device_under_test: Device):
    """backward on a tensor without a graph raises what it raises without us."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x.exp()
            with run.raising("no-graph"):
                y.detach().sum().backward()
            with run.raising("not-scalar"):
                y.backward()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_a_warning_that_is_an_error_comes_out_of_the_operator_and_nothing_is_lost(device_under_test: Device):
    live = Live.now()
    with device_under_test.scope():
        x = torch.ones(32, 32, device=device_under_test.torch_device, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            context = device_under_test.context(budget_bytes=1)
            with pytest.raises(UserWarning, match="budget_bytes"), context:
                x.exp().exp()
    assert settled(live) == live
    step_is_right(device_under_test)


# ---- the disk ----


def test_a_directory_that_is_missing_or_a_file_is_told_before_anything_is_entered(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for directory, error in ((tmp_path / "missing", FileNotFoundError), (tmp_path / "file", NotADirectoryError)):
        with pytest.raises(error, match="disk_dir"):
            torchoffload.OffloadActivations(tier="disk", disk_dir=directory)
    step_is_right(Device("disk", tmp_path))


def test_a_directory_removed_after_construction(tmp_path: Path):
    directory = tmp_path / "gone"
    directory.mkdir()
    context = torchoffload.OffloadActivations(tier="disk", disk_dir=directory, min_offload_size=0)
    directory.rmdir()
    x = torch.ones(32, 32, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(RuntimeError, OSError):
        warnings.simplefilter("always")
        with context:
            y = x.exp()
        y.sum().backward()
        assert torch.equal(x.grad, x.detach().exp())
        assert any("disk_dir" in str(each.message) for each in caught), "kept, and told so"
    step_is_right(Device("disk", tmp_path))


@contextlib.contextmanager
def small_disk(directory: Path, nbytes: int):
    """A file system that fills up: a tmpfs of `nbytes`."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(directory)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize("on_full", ["keep", "error"])
def test_a_full_disk(tmp_path: Path, on_full: str):
    """What fits moves; the rest is kept with one warning, or raises; gradients are the same and nothing hangs."""
    with small_disk(tmp_path / "small", 4 << 20) as directory, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context = torchoffload.OffloadActivations(
            tier="disk", disk_dir=directory, min_offload_size=0, offload_window_bytes=0, on_full=on_full
        )

        def train(hooks: contextlib.AbstractContextManager) -> torch.Tensor:
            x = torch.linspace(-1, 1, 1 << 18).requires_grad_()  # 1 MiB
            with hooks:
                y = x
                for _ in range(12):
                    y = y.sigmoid() * x
            y.sum().backward()
            return x.grad

        expected = train(contextlib.nullcontext())
        torchoffload.reset_stats()
        if on_full == "error":
            with pytest.raises(RuntimeError, match="disk_dir"):
                train(context)
        else:
            for _ in range(2):
                assert torch.equal(train(context), expected)
            assert torchoffload.stats().records_kept.keys() & {"tier_full", "write_failed"}
            told = [str(each.message) for each in caught if "stay on the device" in str(each.message)]
            assert len(told) == 1, f"one warning, not {told}"
            assert "disk_dir" in told[0]
            assert os.strerror(28) in told[0]
    step_is_right(Device("disk", tmp_path))


def spill_files(directory: Path) -> list[int]:
    """The open, unlinked files of this process that were made in `directory`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(directory)):
                found.append(int(name))
    return found


def test_a_spill_file_that_was_cut_off_raises_at_unpack(tmp_path: Path):
    """Never silent bytes: the error says where, and the next step is right."""
    device = Device("disk", tmp_path)
    live, x = Live.now(), torch.linspace(-1, 1, 1 << 16).requires_grad_()
    with device.context(reload_window_bytes=0):
        y = x.exp().sin()
    files = spill_files(tmp_path)
    assert files, "the spill file is open, without a name"
    for file in files:
        with open(f"/proc/self/fd/{file}", "r+b") as spill:
            spill.truncate(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"could not be read back.*offset"):
            y.sum().backward(retain_graph=True)
    assert x.grad is None
    del y
    assert settled(live) == live
    step_is_right(device)


# ---- whole programs ----


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TORCHOFFLOAD_TESTING": "0"} | environment,
    )


def test_disabled_by_the_environment_nothing_moves_and_nothing_is_refused(tmp_path: Path):
    """Also where the tier has no accelerator: a no-op refuses nothing."""
    done = run_python(
        f"""
import torch, torchoffload
x = torch.ones(1 << 20, requires_grad=True)
for options in ({{}}, {{"tier": "disk", "disk_dir": {str(tmp_path)!r}, "min_offload_size": 0}}):
    with torchoffload.OffloadActivations(**options), torchoffload.NoOpManager():
        y = x.exp().sin()
    y.sum().backward()
with torchoffload.OffloadActivations(**options):
    y = x.exp().sin()
y.sum().backward()
print(torchoffload.stats().handles, torchoffload.stats().bytes_offloaded)
""",
        TORCHOFFLOAD_DISABLE="1",
    )
    assert done.stdout.split() == ["0", "0"], done.stderr


@pytest.mark.parametrize("ending", ["pass", "import os; os._exit(0)", "raise SystemExit(0)", "pid = fork()"])
def test_the_process_ends_with_work_in_flight(tmp_path: Path, ending: str):
    done = run_python(
        f"""
import os, torch, torchoffload
def fork():
    pid = os.fork()
    if pid == 0:
        global y, x
        del y
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the child died"
    y.sum().backward()
    assert torch.equal(x.grad, expected)
x = torch.linspace(-1, 1, 1 << 20, requires_grad=True)
x.exp().exp().exp().sum().backward()
expected, x.grad = x.grad, None
context = torchoffload.OffloadActivations(tier="disk", disk_dir={str(tmp_path)!r}, min_offload_size=0)
context.__enter__()
y = x.exp().exp().exp()
print("reached", flush=True)
{ending}
"""
    )
    assert (done.returncode, done.stdout.split()) == (0, ["reached"]), done.stderr
    assert "rror" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [], "a spill file has no name"
