"""Blocks that a program replaces, deletes or adds between steps."""

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchoffload
from fitted_models import Wide, fitted_on
from planned_blocks import WIDTH
from simulated_allocator import SimulatedAllocator

ROOM_FOR_ALL = 1 << 40
STEPS = 14  # until a plan has settled


def seq(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(Wide(4, 2) for _ in range(count)))


def step(model: nn.Module) -> None:
    model(torch.randn(8, 8, WIDTH, requires_grad=True)).square().mean().backward()


def least_bytes(model: nn.Sequential) -> int:
    """What a step reserves with each block in a checkpoint."""
    with SimulatedAllocator() as allocator:
        allocator.hold([*model.parameters()])
        x = torch.randn(8, 8, WIDTH, requires_grad=True)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        x.square().mean().backward()
    model.zero_grad()
    return allocator.most_reserved_bytes


class Named(nn.Module):
    """Blocks under a name that may differ."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, seq())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.name)(x)


def replaced(model: nn.Sequential) -> None:
    for number in range(len(model)):
        model[number] = Wide(4, 2)


def deeper(model: nn.Sequential) -> None:
    replaced(model)
    model.extend(seq(2))


def shifted(model: nn.Sequential) -> None:
    for number, block in enumerate([*model[4:], *seq(4)]):
        model[number] = block


def nested(model: nn.Sequential) -> None:
    model[1] = seq(3)


def renamed(model: nn.Sequential) -> None:
    model[0] = Named("others")


CHANGES: dict[str, tuple[Callable[[], nn.Sequential], Callable[[nn.Sequential], None]]] = {
    "replaced": (seq, replaced),
    "deeper": (seq, deeper),
    "shifted": (seq, shifted),
    "nested": (seq, nested),
    "untied": (lambda: nn.Sequential(*[Wide(4, 2)] * 6), replaced),
    "renamed": (lambda: nn.Sequential(Named("layers")), renamed),
}


@pytest.mark.parametrize("when", [1, 5, STEPS])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_runs_in_the_memory_in_which_a_fresh_fit_of_it_runs(change: str, when: int):
    torch.manual_seed(0)
    make, changes = CHANGES[change]
    weights_bytes = sum(4 * each.numel() for each in seq(9).parameters())
    memory_bytes = int(1.2 * least_bytes(seq(9))) + weights_bytes  # the first blocks' and the later ones' are counted
    model = make()
    with SimulatedAllocator(1.0, memory_bytes) as allocator, fitted_on(model, allocator, memory_bytes) as handle:
        allocator.hold([*seq(9).parameters()])
        for number in range(when + 2 * STEPS):
            if number == when:
                changes(model)
                gc.collect()
            step(model)
            gc.collect()
        assert allocator.ooms == 0
        assert handle.phase == "settled", handle.report()
        assert set(handle._driver.names) == {each for each in model.modules() if isinstance(each, Wide)}
        assert "blocks were replaced or deleted" in handle.report()


@pytest.mark.parametrize("when", [1, 5, STEPS + 6])
def test_a_model_that_has_lost_most_blocks_is_planned_by_its_own_size(when: int):
    torch.manual_seed(0)
    model = seq(8)
    memory_bytes = int(1.3 * least_bytes(model))
    with SimulatedAllocator(1.0, memory_bytes) as allocator, fitted_on(model, allocator, memory_bytes) as handle:
        allocator.hold([*model.parameters()])
        for number in range(when + STEPS):
            if number == when:
                del model[1:]
            step(model)
            gc.collect()
        assert handle.phase == "settled", handle.report()
        assert "of the largest one's size" not in handle.report()


@pytest.fixture
def handles() -> Iterator[list[torchoffload.Fitted]]:
    found: list[torchoffload.Fitted] = []
    yield found
    for each in found:
        each.remove()


def trained(model: nn.Module, steps: int = STEPS) -> None:
    for _ in range(steps):
        step(model)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


@pytest.mark.parametrize("when", [0, 1, 6, STEPS])
@pytest.mark.parametrize("kind", ["lazy", "TorchScript"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_block_may_be_replaced_by_any_module(kind: str, when: int, handles: list[torchoffload.Fitted]):
    model = seq()
    handles.append(torchoffload.fit(model, ROOM_FOR_ALL, move=False))
    trained(model, when)
    model[1] = Lazy() if kind == "lazy" else torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    trained(model, STEPS + 4)
    assert handles[0].phase == "settled"
    assert ("1 is left alone, since a TorchScript module takes no hooks" in handles[0].report()) == (kind != "lazy")
    assert (model[1] in handles[0]._driver.names) == (kind == "lazy")


def test_a_model_may_be_lazy_from_the_start(handles: list[torchoffload.Fitted]):
    model = nn.Sequential(*(Lazy() for _ in range(4)))
    handles.append(torchoffload.fit(model, ROOM_FOR_ALL, move=False))
    trained(model)
    assert handles[0].phase == "settled"


@pytest.mark.parametrize("every", [1, STEPS])
def test_blocks_that_are_replaced_before_a_plan_has_settled_are_worth_a_warning(
    every: int, handles: list[torchoffload.Fitted]
):
    model = seq()
    handles.append(torchoffload.fit(model, ROOM_FOR_ALL, move=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(12):
            model[number % 6] = Wide(4, 2)
            trained(model, every)
    told = [str(each.message) for each in caught if "replaced again and again" in str(each.message)]
    assert len(told) == (every == 1)
    assert handles[0].report().count("blocks were replaced or deleted") == 1


def test_a_block_of_another_model_that_is_fitted_is_left_alone_and_named(handles: list[torchoffload.Fitted]):
    model, other = seq(), seq()
    handles += [torchoffload.fit(each, ROOM_FOR_ALL, move=False, blocks=Wide) for each in (model, other)]
    trained(model)
    model[1] = other[1]
    trained(model)
    assert "1 is left alone, since it is a block of another model that is fitted" in handles[0].report()
    assert (model[1] in handles[0]._driver.names, model[1] in handles[1]._driver.names) == (False, True)


def test_a_block_of_a_fitted_model_that_is_gone_is_taken(handles: list[torchoffload.Fitted]):
    model, other = seq(), seq()
    handles.append(torchoffload.fit(model, ROOM_FOR_ALL, move=False, blocks=Wide))
    torchoffload.fit(other, ROOM_FOR_ALL, move=False, blocks=Wide)
    trained(model)
    model[1] = other[1]
    del other
    gc.collect()
    trained(model)
    assert model[1] in handles[0]._driver.names


def test_a_fit_that_is_removed_leaves_blocks_that_went_to_another_model_alone(handles: list[torchoffload.Fitted]):
    model, other = seq(), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    first = torchoffload.fit(model, ROOM_FOR_ALL, move=False, blocks=Wide)
    trained(model)
    other.append(model[3])
    del model[3]
    model[0] = Wide(4, 2)
    trained(model)
    assert other[2] not in first._driver.names
    handles.append(torchoffload.fit(other, ROOM_FOR_ALL, move=False, blocks=Wide))
    first.remove()
    trained(other)
    assert handles[0].phase == "settled"
    other[2].requires_grad_(False)
    trained(other, 3)
    assert handles[0].phase != "settled"  # since it has seen that the block has changed


def test_blocks_that_the_user_has_left_out_stay_so_if_names_shift(handles: list[torchoffload.Fitted]):
    model = seq(4)
    handles.append(torchoffload.fit(model, ROOM_FOR_ALL, move=False, blocks=["0", "1"]))
    trained(model)
    del model[1]
    trained(model)
    assert dict(handles[0]._driver.names) == {model[0]: "0"}
    model[0] = Wide(4, 2)
    trained(model)
    assert dict(handles[0]._driver.names) == {model[0]: "0"}


class Cyclic(Wide):
    """It lives on until the garbage collector has run, as a compiled block does."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.__dict__["itself"] = self


@pytest.mark.parametrize("has_room", [True, False])
def test_blocks_that_live_on_are_told_and_given_up_if_a_step_is_lost(has_room: bool):
    torch.manual_seed(0)
    model = nn.Sequential(*(Cyclic() for _ in range(6)))
    weights_bytes = 2 * sum(4 * each.numel() for each in model.parameters())  # those of the old blocks stay
    memory_bytes = ROOM_FOR_ALL if has_room else int(1.2 * least_bytes(model)) + weights_bytes
    gc.disable()
    try:
        with SimulatedAllocator(1.0, memory_bytes) as allocator, fitted_on(model, allocator, memory_bytes) as handle:
            allocator.hold([*model.parameters()])
            trained(model, STEPS)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in range(6):
                    model[number] = Cyclic()
                for _ in range(2 * STEPS):
                    try:
                        step(model)
                    except torch.OutOfMemoryError:
                        model.zero_grad()
            told = [str(each.message) for each in caught if "call fit again" in str(each.message)]
            assert len(told) == has_room
            assert (allocator.ooms == 0) == has_room
            assert handle.phase == "settled", handle.report()
            assert (model[1] in handle._driver.names) != has_room
            if not has_room:
                failures = allocator.ooms
                trained(model, 4)
                assert allocator.ooms == failures
    finally:
        gc.enable()


def test_a_plan_that_is_saved_as_a_block_was_replaced_is_for_the_new_one(
    handles: list[torchoffload.Fitted], tmp_path: Path
):
    model: Any = seq()
    handles.append(torchoffload.fit(model, ROOM_FOR_ALL, move=False))
    trained(model)
    model[1] = Wide(4, 2)
    handles[0].save(tmp_path / "plan.json")
    handles.append(torchoffload.fit(model, plan=tmp_path / "plan.json", move=False))
    trained(model, 3)
    assert handles[1].phase == "settled"
    assert model[1] in handles[1]._driver.names
