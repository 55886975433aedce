"""Windows that change from module to module: in forward, at its end, and in backward."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from torchoffload._core import core
from torchoffload._fit.block.following import BlockWindows, Following
from torchoffload._modules.selection import Chosen

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

pytestmark = pytest.mark.devices("simulated-late", "simulated-early")

UNIT = 4096
LARGE = 100 * UNIT
Windows = tuple[int, int, int]


class Saves(nn.Module):
    """Saves as many units as it is told, in one tensor that nobody else holds, and a small one that stays."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(torch.exp(x.expand(self.units * 16, -1)).sum(0))


class SavesLast(Saves):
    """Saves a tensor in its last operator that saves anything, so that no later save begins the copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.exp(x.expand(self.units * 16, -1)).sum(0)


def offloaded(
    windows: Sequence[Windows], kind: type[Saves] = Saves
) -> tuple[nn.Sequential, torchoffload.OffloadedModules]:
    """Blocks that save 1, 2, 3, ... units, each with windows of its own."""
    model = nn.Sequential(*(kind(number + 1) for number in range(len(windows))))
    handle = torchoffload.offload_modules(model, list(model), min_offload_size=UNIT, learn=False)
    core.set_module_windows(handle._offloading.context, [(0, 0, 0), *windows])
    return model, handle


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 64).requires_grad_()


def waits(windows: Sequence[Windows]) -> list[int]:
    """How many copies out were waited for by the time that each block begins, and when the model has returned."""
    model, handle = offloaded(windows)
    before = torchoffload.stats().window_waits
    found: list[int] = []
    for block in model:  # behind the hook of offload_modules, which comes last
        block.register_forward_pre_hook(lambda *_: None)
        block.forward = noting(block.forward, found)
    loss = model(leaf()).sum()
    found.append(torchoffload.stats().window_waits)
    loss.backward()
    handle.remove()
    return [count - before for count in found]


def noting(forward, found: list[int]):
    def noted(x: torch.Tensor) -> torch.Tensor:
        found.append(torchoffload.stats().window_waits)
        return forward(x)

    return noted


@pytest.mark.parametrize(
    ("windows", "wanted"),
    [
        pytest.param([(LARGE, LARGE, 0)] * 4, [0, 0, 0, 0, 0], id="nothing is waited for"),
        pytest.param([(0, 0, 0)] * 4, [0, 1, 2, 3, 4], id="everything is waited for"),
        pytest.param([(LARGE, LARGE, 0)] * 3 + [(LARGE, 0, 0)], [0, 0, 0, 0, 4], id="at the end"),
        pytest.param([(LARGE, LARGE, 0)] * 2 + [(2 * UNIT, LARGE, 0)] * 2, [0, 0, 1, 3, 4], id="as a block begins"),
        pytest.param([(LARGE, LARGE, 0), (LARGE, 2 * UNIT, 0), (LARGE, LARGE, 0)], [0, 0, 1, 1], id="between blocks"),
    ],
)
def test_no_more_is_on_its_way_out_than_the_window_of_the_moment(
    device_under_test: Device, windows: list[Windows], wanted: list[int]
):
    with device_under_test.scope():
        assert waits(windows) == wanted


def test_the_last_copy_of_a_block_counts_in_the_window_of_a_block_that_moves_nothing(device_under_test: Device):
    """No save comes behind it at which its copy would begin, and until then nothing counts its bytes."""
    with device_under_test.scope():
        model, handle = offloaded([(LARGE, LARGE, 0), (0, 0, 0), (0, 0, 0)], SavesLast)
        handle._offloading.moving = frozenset([1])
        found: list[int] = []
        for block in model:
            block.forward = noting(block.forward, found)
        before = torchoffload.stats()
        loss = model(leaf()).sum()
        assert [count - before.window_waits for count in found] == [0, 1, 1]
        loss.backward()
        handle.remove()


@pytest.mark.parametrize("calls", ["blocks", "parts"])
def test_a_block_that_moves_nothing_waits_for_the_copies_of_earlier_calls(device_under_test: Device, calls: str):
    """As in a loop that calls the blocks themselves, or a generator and its critic: no save has opened a tape there."""
    with device_under_test.scope():
        model, handle = offloaded([(LARGE, LARGE, 0), (LARGE, LARGE, 0), (UNIT, UNIT, 0), (0, 0, 0)])
        handle._offloading.moving = frozenset([1, 2])
        found: list[int] = []
        for block in model:
            block.forward = noting(block.forward, found)
        before = torchoffload.stats()
        x = leaf()
        for part in model if calls == "blocks" else (model[:2], model[2:]):
            x = part(x)
        # The first block saves one unit, and the second one two.
        assert [count - before.window_waits for count in found] == [0, 0, 2, 2]
        x.sum().backward()
        handle.remove()


def test_the_windows_of_a_second_forward_hold_before_its_first_save(device_under_test: Device):
    with device_under_test.scope():
        model, handle = offloaded([(LARGE, LARGE, 0), (LARGE, LARGE, 0)])
        offloading = handle._offloading
        offloading.moving = frozenset([1])
        before = torchoffload.stats().window_waits
        first = model(leaf())
        assert torchoffload.stats().window_waits == before
        offloading.moving = frozenset([3])  # the context opens, and neither of the blocks moves
        core.set_module_windows(offloading.context, [(0, 0, 0), (0, 0, 0), (0, 0, 0)])
        second = model(leaf())
        assert torchoffload.stats().window_waits == before + 1
        (first + second).sum().backward()
        handle.remove()


def reloads(windows: Sequence[Windows]) -> list[list[int]]:
    """For each block, from the last one on: whose bytes begin to come back while its backward runs, by their units."""
    model, handle = offloaded(windows)
    copied: list[list[int]] = []

    def copies() -> list[int]:
        return [int(line.split()[-1]) // UNIT for line in testing.seam_log() if line.startswith("copy_in")]

    def note(_grad: torch.Tensor) -> None:
        copied.append(copies()[sum(map(len, copied)) :])

    x = given = leaf()
    inputs = []
    for block in model:
        block.register_forward_pre_hook(lambda _block, args: inputs.append(args[0]))
    loss = model(given).sum()
    for x in reversed(inputs):
        x.register_hook(note)
    testing.start_seam_log()
    try:
        loss.backward()
    finally:
        testing.stop_seam_log()
    handle.remove()
    return copied


@pytest.mark.parametrize(
    ("in_backward", "wanted"),
    [
        pytest.param([0, 0, 0, 0], [[4], [3], [2], [1]], id="as it is asked for"),
        pytest.param([LARGE] * 4, [[4, 3, 2, 1], [], [], []], id="all at once"),
        pytest.param([LARGE, LARGE, LARGE, 0], [[4], [3, 2, 1], [], []], id="behind the first block"),
        pytest.param([0, 1, 3, 3], [[4, 3], [], [2, 1], []], id="as much as there is room for"),
        pytest.param([0, 0, LARGE, 0], [[4], [3, 2], [], [1]], id="it has room in the windows on the way, too"),
        pytest.param([0, 1, LARGE, 0], [[4], [3, 2, 1], [], []], id="beside what is asked for before"),
        pytest.param([0, LARGE, 2, LARGE], [[4, 3, 2], [], [1], []], id="until the consumer comes there"),
    ],
)
def test_what_is_reloaded_ahead_has_room_in_the_window_of_the_block_that_runs(
    device_under_test: Device, in_backward: list[int], wanted: list[list[int]]
):
    with device_under_test.scope():
        sizes = [size if size == LARGE else size * UNIT for size in in_backward]
        assert reloads([(0, 0, size) for size in sizes]) == wanted


def test_a_record_that_an_early_block_made_has_the_window_of_the_block_that_asks(device_under_test: Device):
    """The last block saves what the first one has saved: it does not take the first block's window."""

    class Both(nn.Module):
        def forward(self, made: torch.Tensor) -> torch.Tensor:
            return torch.sin(made * made)

    def gradient(windows: Sequence[Windows]) -> tuple[torch.Tensor, list[int]]:
        model = nn.Sequential(nn.Tanh(), Both(), Both())
        handle = torchoffload.offload_modules(model, list(model), min_offload_size=0, learn=False)
        core.set_module_windows(handle._offloading.context, [(0, 0, 0), *windows])
        x = torch.linspace(-1, 1, UNIT // 4).requires_grad_()
        loss = model(x).sum()
        testing.start_seam_log()
        loss.backward()
        testing.stop_seam_log()
        handle.remove()
        assert x.grad is not None
        return x.grad, [1 for line in testing.seam_log() if line.startswith("copy_in")]

    with device_under_test.scope():
        for windows in ([(0, 0, 0)] * 3, [(0, 0, LARGE), (0, 0, 0), (0, 0, 0)], [(LARGE, 0, LARGE)] * 3):
            found, _ = gradient(windows)
            x = torch.linspace(-1, 1, UNIT // 4).requires_grad_()
            nn.Sequential(nn.Tanh(), Both(), Both())(x).sum().backward()
            assert torch.equal(found, x.grad)


def test_a_tape_that_opens_in_a_block_has_the_windows_of_that_block(device_under_test: Device):
    """The first block saves nothing, so the tape opens only in the second one."""
    with device_under_test.scope():
        model = nn.Sequential(nn.Identity(), Saves(1), Saves(2))
        handle = torchoffload.offload_modules(model, list(model), min_offload_size=UNIT, learn=False)
        core.set_module_windows(handle._offloading.context, [(0, 0, 0), (LARGE, LARGE, 0), (0, 0, 0), (0, 0, 0)])
        before = torchoffload.stats().window_waits
        loss = model(leaf()).sum()
        assert torchoffload.stats().window_waits - before == 2
        loss.backward()
        handle.remove()


def test_nothing_stays_at_the_loss_because_it_was_learned(device_under_test: Device):
    """A context that learns keeps the end of a tape, as much as its windows hold. A plan has no room for it."""
    with device_under_test.scope():
        model = nn.Sequential(*(Saves(number + 1) for number in range(4)))
        chosen = [Chosen(str(number), block) for number, block in enumerate(model)]
        following = Following(model, chosen, may_move=True, options=torchoffload.OffloadOptions(min_offload_size=UNIT))
        windows = {block: [BlockWindows(LARGE, 0 if block is model[3] else LARGE, LARGE)] for block in model}
        following.follow({}, {block: [True] for block in model}, LARGE, windows)
        for _ in range(6):
            torchoffload.reset_stats()
            loss = model(leaf()).sum()
            stats = torchoffload.stats()
            assert (stats.records_offloaded, stats.window_waits) == (4, 4)
            assert stats.records_kept.keys() <= {"small"}
            loss.backward()
        following.remove()


class Twice(nn.Module):
    """Calls a block twice, without gradients in between as in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Saves(3), Saves(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        with torch.no_grad():
            self.block(x)
        return self.block(self.other(x))


@pytest.mark.parametrize(
    ("moves", "windows", "moved", "wanted"),
    [
        pytest.param([True, False], [(LARGE, LARGE), (LARGE, LARGE)], 3, 0, id="the first call moves"),
        pytest.param([False, True], [(LARGE, LARGE), (LARGE, LARGE)], 3, 0, id="the second call moves"),
        pytest.param([True, True], [(LARGE, LARGE), (LARGE, 0)], 6, 2, id="both are waited for at the end"),
        pytest.param([True, True], [(0, 0), (LARGE, LARGE)], 6, 1, id="the first one is waited for"),
        pytest.param([True, False], [(LARGE, LARGE), (0, LARGE)], 3, 1, id="as the second call begins"),
    ],
)
def test_each_call_of_a_block_moves_and_waits_as_it_is_planned(
    device_under_test: Device, moves: list[bool], windows: list[tuple[int, int]], moved: int, wanted: int
):
    with device_under_test.scope():
        model = Twice()
        chosen = [Chosen("block", model.block), Chosen("other", model.other)]
        following = Following(model, chosen, may_move=True, options=torchoffload.OffloadOptions(min_offload_size=UNIT))
        of_calls = [BlockWindows(*each, LARGE) for each in windows]
        of_blocks = {model.block: of_calls, model.other: [BlockWindows(LARGE, LARGE, LARGE)]}
        following.follow({}, {model.block: moves, model.other: [False]}, LARGE, of_blocks)
        for _ in range(3):
            following.reset_turns()
            torchoffload.reset_stats()
            x = leaf()
            model(x).sum().backward()
            stats = torchoffload.stats()
            assert (stats.bytes_offloaded // UNIT, stats.window_waits) == (moved, wanted)
            expected = leaf()
            plain = Twice()
            plain(expected).sum().backward()
            assert torch.equal(x.grad, expected.grad)
        following.remove()
