"""What only a GPU shows: delays planted on streams, memory written over once it is free, the calls at the seam.

Everything here needs a CUDA device; the rest of the suite runs on it too, as "cuda".
"""

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Live, Run, assert_same_gradients, settled
from models import TinyGpt, tokens_and_labels, update
from places import environment_with_support

pytestmark = [pytest.mark.cuda, pytest.mark.devices("cuda")]

DELAY_CYCLES = 20_000_000  # about 10 ms
ROWS = 1024  # a record of the programs below: 1024 x 1024 floats, 4 MiB


def delay() -> None:
    torch.cuda._sleep(DELAY_CYCLES)


def overwrite_free_memory(count: int = 24) -> None:
    """Takes every block that was freed, writes over it, and frees it again; as later work of a model would."""
    for _ in range(2):
        garbage = [torch.full((ROWS, ROWS), float("nan"), device="cuda") for _ in range(count)]
        del garbage


@contextlib.contextmanager
def hogged_copy_engines() -> Iterator[None]:
    """Both directions of the link are busy with someone else's copies for tens of milliseconds."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        for _ in range(4):
            host.copy_(device, non_blocking=True)
    with torch.cuda.stream(streams[1]):
        for _ in range(4):
            device.copy_(host, non_blocking=True)
    yield
    torch.cuda.synchronize()


def chain(x: torch.Tensor, weight: torch.Tensor, *, slow: bool = False) -> torch.Tensor:
    """Eight records of 4 MiB and some that are kept."""
    y = x
    for step in range(8):
        if slow and step % 3 == 0:
            delay()
        y = (y @ weight).sigmoid() if step % 2 else y.tanh()
    return y


WINDOWS = [(0, 0), (0, None), (5 << 20, 5 << 20), (None, None)]


@pytest.mark.parametrize("window", WINDOWS, ids=["least", "least-out", "one-record", "default"])
@pytest.mark.parametrize("slow", ["nothing", "compute", "copies", "both"])
def test_delays_change_nothing(device_under_test: Device, slow: str, window: tuple[int | None, int | None]):
    options = {"offload_window_bytes": window[0], "reload_window_bytes": window[1]}

    def program(run: Run):
        x, weight = run.leaf(ROWS, ROWS), run.parameter(ROWS, ROWS)
        with hogged_copy_engines() if slow in ("copies", "both") else contextlib.nullcontext():
            for _ in range(3):
                with run.offload(**options):
                    y = chain(x, weight, slow=slow in ("compute", "both"))
                overwrite_free_memory()
                if slow in ("compute", "both"):
                    delay()
                y.sum().backward()
                overwrite_free_memory()
                del y
                run.check(x=x.grad, weight=weight.grad)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("option", ["use_pin_memory", "use_streams"])
def test_delays_change_nothing_without_streams_or_pinned_memory(device_under_test: Device, option: str):
    def program(run: Run):
        x, weight = run.leaf(ROWS, ROWS), run.parameter(ROWS, ROWS)
        for _ in range(2):
            with run.offload(**{option: False}, offload_window_bytes=0):
                y = chain(x, weight, slow=True)
            overwrite_free_memory()
            y.sum().backward()
            overwrite_free_memory()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_producer_on_a_side_stream_is_slow(device_under_test: Device):
    """R2: the copy waits for the stream that was current at the pack, not for the default one."""

    def program(run: Run):
        side, x = torch.cuda.Stream(), run.leaf(ROWS, ROWS)
        for _ in range(3):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), run.offload(offload_window_bytes=0):
                delay()
                y = (x * 2).exp().sin().exp()
                loss = y.sum()
            torch.cuda.current_stream().wait_stream(side)
            overwrite_free_memory()
            loss.backward()
            run.check(gradient=x.grad)

    assert_same_gradients(program, device=device_under_test)


def test_a_consumer_on_a_side_stream_is_slow_and_its_buffers_are_dropped(device_under_test: Device):
    """R3, R7: what unpack handed to a slow stream is not given to another before that stream is done."""

    def program(run: Run):
        side, x = torch.cuda.Stream(), run.leaf(ROWS, ROWS)
        with run.offload(offload_window_bytes=0, reload_window_bytes=0):
            nodes = [(x * step).exp().sin() for step in range(1, 7)]
        side.wait_stream(torch.cuda.current_stream())
        copies = []
        with torch.cuda.stream(side):
            for node in nodes:
                delay()
                copies.append(node.grad_fn._saved_self + 1)
        overwrite_free_memory()
        torch.cuda.current_stream().wait_stream(side)
        sum(nodes).sum().backward()
        return copies, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_graphs_are_dropped_while_copies_are_under_way(device_under_test: Device):
    """R9: source, slot and buffer are reused only when the copy that touches them has ended."""

    def program(run: Run):
        x, weight = run.leaf(ROWS, ROWS), run.parameter(ROWS, ROWS)
        with hogged_copy_engines():
            for step in range(6):
                with run.offload(**({} if step % 2 else {"offload_window_bytes": 0})):
                    dropped = chain(x, weight)
                    kept = chain(x, weight)
                del dropped
                overwrite_free_memory()
                if step % 3 == 2:
                    _ = kept.grad_fn._saved_result
                    del kept, _
                    overwrite_free_memory()
                    continue
                kept.sum().backward()
                run.check(x=x.grad, weight=weight.grad)

    assert_same_gradients(program, device=device_under_test)


def test_backward_on_another_thread_and_stream(device_under_test: Device):
    import threading

    def program(run: Run):
        x, weight, stream = run.leaf(ROWS, ROWS), run.parameter(ROWS, ROWS), torch.cuda.Stream()
        with run.offload(offload_window_bytes=0):
            y = chain(x, weight, slow=True).sum()

        def backward() -> None:
            with torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream())
                y.backward()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


# ---- cost: what a warmed-up step does not do ----


# The pinned memory is fitted once to what steps need, as soon as three in a row needed as much.
WARM_UP_STEPS = 6


def train(device: Device, steps: int, **options) -> None:
    run = Run(device, stock=False, context=None)
    model, batch = run.module(lambda: TinyGpt(depth=4, width=128)), tokens_and_labels(run, 4, 128)
    for _ in range(steps):
        with device.context(**options):
            loss = model(*batch)
        loss.backward()
        update(model)


@pytest.mark.parametrize("options", [{}, {"offload_window_bytes": None}], ids=["least", "default"])
def test_a_warmed_up_step_neither_synchronises_nor_asks_nor_pins(device_under_test: Device, options: dict):
    pytest.importorskip("torchoffload._C_testing", reason="calls of the device are logged in the test build alone")
    from simulated import seam_log

    train(device_under_test, WARM_UP_STEPS, **options)
    pinned_bytes = torchoffload.stats().pinned_bytes
    with seam_log() as lines:
        train(device_under_test, 2, **options)
    kinds = {line.split()[0] for line in lines}
    assert {"copy_out", "record", "wait"} <= kinds
    assert not kinds & {"synchronize", "status", "grow"}, sorted(kinds)
    assert torchoffload.stats().pinned_bytes == pinned_bytes


def test_a_warmed_up_step_passes_cudas_own_synchronisation_check(device_under_test: Device):
    train(device_under_test, WARM_UP_STEPS)
    run = Run(device_under_test, stock=False, context=None)
    x, weight = run.leaf(ROWS, ROWS), run.parameter(ROWS, ROWS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            with device_under_test.context():
                y = chain(x, weight)
            y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [(0, 0), (5 << 20, 5 << 20)], ids=["least", "one-record"])
def test_the_calls_at_the_seam_are_those_of_the_simulated_device(device_under_test: Device, window: tuple[int, int]):
    pytest.importorskip("torchoffload._C_testing", reason="calls of the device are logged in the test build alone")
    from simulated import seam_log

    def log_of(device: Device) -> list[str]:
        with device.scope():
            run = Run(device, stock=False, context=None)
            x, weight = run.leaf(ROWS, ROWS), run.parameter(ROWS, ROWS)
            for step in range(WARM_UP_STEPS + 1):
                # Slots that were used before are guarded otherwise than fresh ones.
                with contextlib.ExitStack() as stack:
                    lines = stack.enter_context(seam_log()) if step == WARM_UP_STEPS else None
                    context = device.context(offload_window_bytes=window[0], reload_window_bytes=window[1])
                    with context:
                        y = chain(x, weight)
                        dropped = y.exp()
                    del dropped
                    loss = y.sum()
                    loss.backward(retain_graph=True)
                    loss.backward()
                    del y, loss
                x.grad = weight.grad = None
            gc.collect()
        return [line for line in lines if not line.startswith(("saw_", "grow"))]

    on_cuda = log_of(device_under_test)
    simulated = log_of(Device("simulated-late", device_under_test.directory))
    assert len(on_cuda) > 50
    assert on_cuda == simulated


def test_memory_at_the_loss_falls_by_what_was_moved(device_under_test: Device):
    run = Run(device_under_test, stock=True, context=None)
    x, weight = run.leaf(ROWS, ROWS), run.parameter(ROWS, ROWS)

    def held_at_the_loss(hooks) -> int:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with hooks:
            loss = chain(x, weight).sum()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        x.grad = weight.grad = None
        return held

    held_at_the_loss(contextlib.nullcontext())  # cuBLAS takes its workspace
    plain = held_at_the_loss(contextlib.nullcontext())
    torchoffload.reset_stats()
    offloaded = held_at_the_loss(device_under_test.context(offload_window_bytes=0))
    moved = torchoffload.stats().bytes_offloaded
    # x lives on as the user's own tensor: moving it frees nothing.
    assert moved >= 8 * ROWS * ROWS * 4
    assert plain - offloaded >= 0.99 * (moved - x.nbytes)


def test_the_peak_of_backward_stays_within_the_reload_window(device_under_test: Device):
    run = Run(device_under_test, stock=True, context=None)
    x = run.leaf(ROWS, ROWS)
    x.grad = torch.zeros_like(x)
    with device_under_test.context(offload_window_bytes=0, reload_window_bytes=2 * x.nbytes):
        y = x
        for _ in range(16):
            y = y.sigmoid()
        y = y.sum()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y.backward()
    # The window, the record in use, and two gradients.
    assert torch.cuda.max_memory_allocated() - before <= (2 + 1 + 3) * x.nbytes


def test_a_new_context_each_step_reserves_nothing_more(device_under_test: Device):
    train(device_under_test, 5)
    reserved, pinned = torch.cuda.memory_reserved(), torchoffload.stats().pinned_bytes
    train(device_under_test, 50)
    assert torch.cuda.memory_reserved() <= reserved
    assert torchoffload.stats().pinned_bytes <= pinned


def test_out_of_device_memory_in_backward_is_an_error_and_later_steps_are_right(device_under_test: Device):
    live = Live.now()
    run = Run(device_under_test, stock=True, context=None)
    x = run.leaf(ROWS, ROWS)
    x.grad = torch.zeros_like(x)
    with device_under_test.context(offload_window_bytes=0, reload_window_bytes=0):
        y = x.exp().sin().sum()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(max(torch.cuda.memory_reserved() + 2 * x.nbytes, 1) / total)
    try:
        taken = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(1 << 19, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            y.backward(retain_graph=True)
        del taken
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    y.backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())
    del y
    assert settled(live) == live


@pytest.mark.two_gpus
def test_a_model_on_two_devices(device_under_test: Device):
    def program(run: Run):
        x, weights = run.leaf(ROWS, ROWS), [run.tensor(ROWS, ROWS).to(f"cuda:{i}").requires_grad_() for i in (0, 1)]
        for _ in range(2):
            with run.offload(offload_window_bytes=0):
                y = chain(x, weights[0], slow=True)
                y = chain(y.to("cuda:1"), weights[1])
            y.sum().backward()
        return x.grad, [weight.grad for weight in weights]

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("ending", ["pass", "os._exit(0)", "del y", "fork()"])
def test_the_process_ends_with_copies_in_flight(ending: str):
    program = f"""
import os, torch, torchoffload
from autograd_threads import await_autograd
def fork():
    pid = os.fork()
    if pid == 0:
        global y
        del y
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the child died"
    y.sum().backward()
    assert torch.equal(x.grad, expected)
    await_autograd("cuda")
x = torch.linspace(-1, 1, 1 << 24, device="cuda", requires_grad=True)
x.exp().exp().exp().sum().backward()
expected, x.grad = x.grad, None
await_autograd("cuda")
with torchoffload.OffloadActivations(min_offload_size=0):
    torch.cuda._sleep({DELAY_CYCLES})
    y = x.exp().exp().exp()
print("reached", flush=True)
{ending}
"""
    environment = environment_with_support() | {"TORCHOFFLOAD_TESTING": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["reached"]), done.stderr
    assert "rror" not in done.stderr, done.stderr
