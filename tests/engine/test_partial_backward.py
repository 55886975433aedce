"""What a backward reloaded and did not use goes back to its slots when it ends, however it ends (R14)."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

import torchoffload
from autograd_threads import await_autograd
from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients
from simulated import seam_log

NUMEL = 1024
NBYTES = 4 * NUMEL
DEPTH = 20
WINDOW_RECORDS = 8
LATE = pytest.mark.devices("simulated-late", "privateuseone")


def context(**options: Any) -> torchoffload.OffloadActivations:
    chosen = {"min_offload_size": 0, "offload_window_bytes": 0, "reload_window_bytes": WINDOW_RECORDS * NBYTES}
    return torchoffload.OffloadActivations(**({"learn": False} | chosen | options))


def leaf(device: Device) -> torch.Tensor:
    return torch.linspace(-1, 1, NUMEL, device=device.torch_device).requires_grad_()


def chain(x: torch.Tensor, depth: int = DEPTH) -> torch.Tensor:
    for _ in range(depth):
        x = x.sin()
    return x


def step(device: Device, **options: Any) -> str:
    """A whole step; tells what its backward enqueued: I for each copy in, W for each wait."""
    with context(**options):
        y = chain(leaf(device))
    with seam_log() as log:
        y.sum().backward()
    return "".join("I" if line.startswith("copy_in") else "W" if line.startswith("wait") else "" for line in log)


class Refused(Exception):
    pass


def refuse(_gradient: torch.Tensor) -> None:
    raise Refused


def over_one_node(device: Device) -> Any:
    with context():
        middle = chain(leaf(device))
        out = middle.exp()
    torch.autograd.grad(out.sum(), middle, retain_graph=True)
    return out


def ended_by_an_exception(device: Device) -> Any:
    with context():
        middle = chain(leaf(device))
        middle.register_hook(refuse)
        out = middle.exp()
    with pytest.raises(Refused):
        out.sum().backward()
    return out


def on_another_thread(device: Device) -> Any:
    kept = []
    thread = threading.Thread(target=lambda: kept.append(over_one_node(device)))
    thread.start()
    thread.join()
    return kept


def inside_of_a_backward(device: Device) -> Any:
    """A graph task that another one waits for."""
    with context():
        middle = chain(leaf(device))
        out = middle.exp().sum()

    def take_a_part() -> None:
        torch.autograd.grad(out, middle, retain_graph=True)

    Save.apply(leaf(device), take_a_part).sum().backward()
    return out


def with_the_graph_built(device: Device) -> Any:
    with context():
        middle = chain(leaf(device))
        out = middle.exp()
    return out, torch.autograd.grad(out.sum(), middle, create_graph=True)


def of_two_tapes(device: Device) -> Any:
    with context():
        first = chain(leaf(device))
    with context():
        second = first.exp() * chain(first).cos()
    torch.autograd.grad(second.sum(), first, retain_graph=True)
    return second


PARTS: dict[str, Callable[[Device], Any]] = {
    "one-node": over_one_node,
    "exception": ended_by_an_exception,
    "other-thread": on_another_thread,
    "nested": inside_of_a_backward,
    "create-graph": with_the_graph_built,
    "two-tapes": of_two_tapes,
}


def let_go(device: Device) -> None:
    """Autograd's thread of the device drops what it has of its last backward."""
    if device.name == "privateuseone":
        await_autograd(device.name)


@LATE
@pytest.mark.parametrize("part", PARTS)
def test_a_backward_over_a_part_leaves_the_reload_window_to_the_next(device_under_test: Device, part: str):
    device = device_under_test
    with device.scope():
        expected = step(device)
        kept = PARTS[part](device)
        let_go(device)
        assert "IIIIIIII" in expected  # the first one reloads a whole window ahead
        assert step(device) == expected
        assert step(device) == expected
        del kept


@LATE
@pytest.mark.parametrize("part", [part for part in PARTS if part != "exception"])
def test_nothing_that_was_reloaded_ahead_stays_on_the_device(device_under_test: Device, part: str):
    """Of the graph that is kept alive only what its tape's last operator saved is still here, as before."""
    device = device_under_test
    with device.scope() as simulation:
        kept = PARTS[part](device)
        let_go(device)
        torchoffload.trim()
        allocated_bytes = simulation.allocated_bytes()
        assert allocated_bytes < WINDOW_RECORDS * NBYTES
        del kept


@LATE
def test_what_a_backward_reloaded_for_the_next_graph_of_its_tape_stays_for_that(device_under_test: Device):
    """Micro-batches of one entry: each backward frees its own graph, and the next one goes on from there."""
    device = device_under_test
    with device.scope():
        torchoffload.reset_stats()
        with context():
            ends = [chain(leaf(device)) for _ in range(3)]
        for end in reversed(ends):
            end.sum().backward()
        stats = torchoffload.stats()
        assert stats.passed_by == 0
        assert 3 * DEPTH - 3 <= stats.records_reloaded <= stats.records_offloaded


@LATE
@pytest.mark.parametrize("event", ["another tape opens", "another tape is asked"])
def test_what_stays_for_the_next_graph_of_a_tape_makes_room_for_another_tape(device_under_test: Device, event: str):
    device = device_under_test
    with device.scope() as simulation:
        with context():
            older = chain(leaf(device))
        with context():
            ends = [chain(leaf(device)) for _ in range(2)]
        torchoffload.reset_stats()
        ends[1].sum().backward()
        let_go(device)
        held_bytes = simulation.allocated_bytes()
        if event == "another tape opens":
            with context():
                leaf(device).sin()
            assert simulation.allocated_bytes() < held_bytes - (WINDOW_RECORDS - 3) * NBYTES
        else:
            older.sum().backward()
        assert torchoffload.stats().passed_by >= WINDOW_RECORDS - 1  # its last operator's source was still here
        ends[0].sum().backward()


@LATE
def test_what_a_failed_backward_reloaded_goes_back_when_the_next_forward_saves(device_under_test: Device):
    device = device_under_test
    with device.scope() as simulation:
        kept = ended_by_an_exception(device)
        let_go(device)
        held_bytes = simulation.allocated_bytes()
        with context():
            other = leaf(device).exp()
        assert simulation.allocated_bytes() < held_bytes - (WINDOW_RECORDS - 3) * NBYTES
        del kept, other


def branches(device: Device, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two sums, whose graphs save the same tensors."""
    x = leaf(device)
    with context(**options):
        h, first, second = x, [], []
        for _ in range(DEPTH):
            h = h + 1
            first.append((h * h).sum())
            second.append(h.cos().sum())
        return x, torch.stack(first).sum(), torch.stack(second).sum()


@LATE
def test_a_backward_of_one_branch_gives_back_what_the_other_waits_for(device_under_test: Device):
    device = device_under_test
    with device.scope() as simulation:
        x, a, b = branches(device, reload_window_bytes=0)
        before_bytes = simulation.allocated_bytes()
        (of_a,) = torch.autograd.grad(a, x, retain_graph=True)
        let_go(device)
        assert simulation.allocated_bytes() <= before_bytes + NBYTES  # the gradient itself
        (of_b,) = torch.autograd.grad(b, x)
        x, a, b = branches(device, min_offload_size=1 << 30)
    assert torch.equal(of_a, torch.autograd.grad(a, x, retain_graph=True)[0])
    assert torch.equal(of_b, torch.autograd.grad(b, x)[0])


@LATE
def test_what_is_read_outside_of_a_backward_is_held_by_its_reader_alone(device_under_test: Device):
    device = device_under_test
    with device.scope() as simulation:
        with context(reload_window_bytes=0):
            h = leaf(device).exp()
            first, second = h.sin(), h.cos()
            later = chain(h)
        del h
        before_bytes = simulation.allocated_bytes()
        saved = first.grad_fn._saved_self
        assert simulation.allocated_bytes() == before_bytes + NBYTES
        again = second.grad_fn._saved_self
        assert again.data_ptr() == saved.data_ptr()
        del saved, again
        assert simulation.allocated_bytes() == before_bytes
        (first.sum() + second.sum() + later.sum()).backward()


def test_bytes_that_were_given_back_are_found_again_while_somebody_has_them(device_under_test: Device):
    """What is written to them is seen by the other handles, and found out: as without us."""

    def program(run: Run):
        x, kept = run.leaf(32, 32), []
        with run.offload():
            h = x * 2
            first, second = Save.apply(h, kept.append, h), Save.apply(h, lambda saved: run.check(other=saved), h)
        del h
        torch.autograd.grad(first.sum(), x, retain_graph=True)
        torch.autograd.grad(second.sum(), x, retain_graph=True)
        kept[0].mul_(2)
        with run.raising("written"):
            torch.autograd.grad(second.sum(), x)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("retained", [False, True], ids=["each-once", "all-again"])
def test_any_order_of_parts_gives_the_same_gradients(device_under_test: Device, retained: bool):
    def program(run: Run):
        x, weight = run.leaf(16, 16), run.parameter(16, 16)
        with run.offload(reload_window_bytes=3000):
            layers = [x]
            for _ in range(6):
                layers.append((layers[-1] @ weight).tanh() * layers[-1].cos())
            heads = [layer.exp().sum() for layer in layers]
        for index in (3, 6, 0, 5):
            run.check(part=torch.autograd.grad(heads[index], layers[max(index - 2, 0)], retain_graph=True))
        del layers
        for _ in range(2 if retained else 1):
            for index in (6, 1, 4):
                run.check(gradients=torch.autograd.grad(heads[index], (x, weight), retain_graph=True))
        return torch.autograd.grad(sum(heads), (x, weight))

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_two_threads_that_each_run_a_part_at_once(device_under_test: Device):
    def program(run: Run):
        outs = []
        for _ in range(2):
            with run.offload(reload_window_bytes=3000):
                x = run.leaf(16, 16)
                middle = x
                for _ in range(6):
                    middle = middle.sin() * middle.cos()
                outs.append((x, middle, middle.exp().sum()))
        found: dict[int, Any] = {}

        def parts(index: int) -> None:
            x, middle, out = outs[index]
            found[index] = [torch.autograd.grad(out, middle, retain_graph=True) for _ in range(10)]
            found[index].append(torch.autograd.grad(out, x))

        threads = [threading.Thread(target=parts, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run.check(found=[found[index] for index in range(2)])

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
