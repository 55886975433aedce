"""What once came out wrong: traces, Python inside an operator, inference mode, storages that go, shared graphs."""

import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchoffload
from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients


def test_a_backward_that_make_fx_traces_has_no_constants(device_under_test: Device):
    """A tensor that unpack builds anew is unknown to the tracer, and would be baked into its graph."""

    def program(run: Run):
        def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
            y = (x * w).sin().exp()
            return torch.autograd.grad(y.sum(), (x, w))

        x, w = run.leaf(32, 32), run.leaf(32, 32)
        with run.offload():
            z = x.exp()
            traced = make_fx(gradients)(x, w)
        z.sum().backward()
        return traced(run.leaf(32, 32), run.leaf(32, 32)), x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="layout")


@pytest.mark.parametrize("inside", ["function", "context"])
def test_python_inside_an_operator_does_not_end_it(device_under_test: Device, inside: str):
    """The operator rrelu saves its noise, then fills it; between the two a dispatch mode runs autograd of its own."""

    def program(run: Run):
        x, other, context = run.leaf(64, 64), run.leaf(8, 8), run.offload()

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if "rrelu" in func.name():
                    if inside == "function":
                        Save.apply(other, lambda _: None, other)
                    else:
                        with context:
                            pass
                return func(*args, **(kwargs or {}))

        torch.manual_seed(4)
        with context:
            with Mode():
                y = F.rrelu(x, training=True)
            z = y.exp().sin()
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_backward_and_reads_in_inference_mode(device_under_test: Device):
    def program(run: Run):
        x, weight, changed = run.leaf(32, 32), run.parameter(32, 32), run.tensor(32, 32)
        with run.offload():
            y = (x.square() * weight).exp()
            z = (x * changed).sin()
        changed.add_(1)
        with torch.inference_mode():
            run.check(saved=z.grad_fn._saved_self.clone())
            y.backward(torch.ones_like(x))
            with run.raising("changed"):
                z.backward(torch.ones_like(x))
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_inference_tensors_inside_a_wrapper(device_under_test: Device):
    def program(run: Run):
        x, y = run.leaf(32, 32), run.leaf(32, 32)
        with torch.inference_mode():
            a, b = run.tensor(32, 32), run.tensor(32, 32)
        pair = TwoTensor(a, b)
        with run.offload():
            z = x * pair
            w = y.exp()
        z.sum().backward()
        w.sum().backward()
        return x.grad.a, x.grad.b, y.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="layout")


def test_a_version_counter_that_is_set_back(device_under_test: Device):
    """As FSDP2 sets it back: the counter is behind what was saved, and bumping it there would take minutes."""

    def program(run: Run):
        x, c = run.leaf(32, 32), run.tensor(32, 32)
        with torch.autograd._unsafe_preserve_version_counter(c):
            c.add_(1)
            with run.offload():
                y = (x * c).exp()
        begin = time.monotonic()
        with run.raising("changed"):
            y.sum().backward()
        assert time.monotonic() - begin < 1

    assert_same_gradients(program, device=device_under_test)


_TAKEN_UNDER_ITS_COPY = """
import sys
import torch, torchoffload
from torchoffload import _C_testing
testing = _C_testing.testing
how, directory = sys.argv[1:]
w = torch.ones(1 << 22, requires_grad=True)
sources = [torch.full((1 << 22,), float(i)) for i in range(4)]
testing.inject_io_fault("pwrite", delay_us=100_000)
with torchoffload.OffloadActivations(tier="disk", disk_dir=directory, offload_window_bytes=1 << 40):
    products = [x * w for x in sources]
for i, x in enumerate(sources):
    if how == "shared":
        x.share_memory_()
        continue
    x.untyped_storage().resize_(0)
    if how == "filled again":
        spare = torch.empty(1 << 22)  # so that it comes to stand elsewhere
        x.untyped_storage().resize_(1 << 24)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
            x.fill_(float(i))
for i, y in enumerate(products):
    try:
        (gradient,) = torch.autograd.grad(y.sum(), w)
        print(bool((gradient == i).all()))
    except RuntimeError as error:
        print("never_offload" in str(error))
print(torchoffload.stats().records_kept)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shared", "emptied", "filled again"])
def test_a_source_that_is_unmapped_under_its_copy(how: str, tmp_path: pathlib.Path):
    """I/O threads read memory that the program gives back: no crash, and what the storage then holds counts."""
    command = [sys.executable, "-c", _TAKEN_UNDER_ITS_COPY, how, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-500:]}"
    lines = done.stdout.splitlines()
    assert lines[:4] == ["True"] * 4
    assert "resized" in lines[4]


def test_a_parameter_of_which_the_data_is_given_back(device_under_test: Device):
    """As ZeRO-3 does: freed after forward, gathered again before backward. Autograd follows `.data`, and so do we."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with run.offload():
            y = (x * weight).exp()
        values, storage = run.tensor(32, 32), weight.untyped_storage()
        alive = storage._weak_ref()
        del storage
        weight.data = torch.empty(0, device=run.device)
        run.check(given_back=torch.UntypedStorage._expired(alive))
        torch.UntypedStorage._free_weak_ref(alive)
        weight.data = values
        y.sum().backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, kept_reason="parameter")


def test_a_kept_leaf_comes_back_as_the_very_object(device_under_test: Device):
    """Its type, its attributes and its `__torch_function__` count in a backward of the user's own."""

    class Doubling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.mul:
                first, second = (each.as_subclass(torch.Tensor) for each in args)
                return first * second * 2
            return super().__torch_function__(func, types, args, kwargs or {})

    def program(run: Run):
        x, doubling, marked, seen = run.leaf(32, 32), run.tensor(32, 32).as_subclass(Doubling), run.tensor(32, 32), []
        doubling.scale = 7
        torchoffload.never_offload(marked)

        def look(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            seen.append((type(first).__name__, getattr(first, "scale", None), first is doubling, second is marked))
            return torch.mul(torch.ones_like(second), first)

        with run.offload():
            y = Save.apply(x, look, doubling, marked).exp()
        y.sum().backward()
        return x.grad, seen

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason=("layout", "marked"))


@pytest.mark.devices("disk")
def test_a_backward_releases_what_another_thread_is_reading(device_under_test: Device):
    from torchoffload import _C_testing

    errors = []
    for _ in range(5):
        x = torch.ones(64, 64, requires_grad=True)
        with device_under_test.context(reload_window_bytes=0):
            y = (x * x).exp()
            loss = y.sum()
        node, started = y.grad_fn, threading.Event()

        def read(node=node, started=started) -> None:
            started.set()
            try:
                _ = node._saved_result
            except RuntimeError as error:
                errors.append(str(error))

        _C_testing.testing.inject_io_fault("pread", delay_us=20_000)
        thread = threading.Thread(target=read)
        thread.start()
        started.wait()
        time.sleep(0.002)
        loss.backward()
        thread.join()
        _C_testing.testing.inject_io_fault("pread", delay_us=0)
    assert [error for error in errors if "already been freed" not in error] == []
