"""What is in Python objects that a block may change: noted, put in place, and put back."""

import array
import collections
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import torchoffload
from torchoffload._fit.effects import Containers


class OwnUpdate(collections.OrderedDict):
    def update(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        raise TypeError("not this way")


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class ReadOnly:
    def __init__(self) -> None:
        self.__dict__["n"] = 1

    @property
    def n(self) -> int:
        return self.__dict__["n"]


class Slotted:
    __slots__ = ("__private", "seen")

    def __init__(self) -> None:
        self.__private = 1

    def add(self) -> None:
        self.__private += 1
        self.seen = True

    def value(self) -> Any:
        return self.__private, getattr(self, "seen", None)


class NamedList(list):
    name = "first"


def counter_in_a_cell() -> Callable[[], int]:
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    return add


def set_name(value: Any) -> None:
    value.name = "second"


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "counter": (lambda: collections.Counter("ab"), lambda c: c.update("a"), dict),
    "own update": (lambda: OwnUpdate(a=1), lambda c: c.__setitem__("b", 2), lambda c: list(c.items())),
    "attribute dict": (lambda: AttributeDict(a=1), lambda c: c.__setitem__("a", 2), dict),
    "read-only property": (ReadOnly, lambda c: c.__dict__.__setitem__("n", 2), lambda c: c.n),
    "slots": (Slotted, lambda c: c.add(), lambda c: c.value()),
    "list with a name": (lambda: NamedList([1]), set_name, lambda c: (c.name, list(c))),
    "transposed array": (lambda: numpy.arange(6.0).reshape(2, 3).T, lambda c: c.fill(7), lambda c: c.tolist()),
    "strided array": (lambda: numpy.arange(6)[::2], lambda c: c.fill(7), lambda c: c.tolist()),
    "array of objects": (lambda: numpy.array([1, "a"], object), lambda c: c.__setitem__(0, 5), lambda c: c.tolist()),
    "array of dates": (lambda: numpy.array(["2000-01-01"], "M8[D]"), lambda c: c.__setitem__(0, "2001-01-01"), str),
    "array of Python": (lambda: array.array("i", [1, 2]), lambda c: c.append(3), lambda c: c.tolist()),
    "random numbers": (lambda: random.Random(1), lambda c: c.random(), lambda c: c.getstate()),
    "deque": (lambda: collections.deque([1, 2], 2), lambda c: c.append(3), list),
    "a proxy of a dict": (lambda: types.MappingProxyType({"a": [1]}), lambda c: c["a"].append(2), lambda c: c["a"][:]),
    "in a frozenset": (lambda: frozenset([ReadOnly()]), lambda c: next(iter(c)).__dict__.update(n=3),
                       lambda c: next(iter(c)).n),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_objects_are_put_in_place_and_put_back(case: str):
    make, change, read = CASES[case]
    block = nn.Linear(2, 2)
    block.state = value = make()
    containers = Containers(block, ((), {}))
    before = read(value)
    assert containers.changed() is None
    change(value)
    after = read(value)
    assert after != before, "the case changes something"
    assert containers.changed() is not None
    with containers.in_place():
        assert read(value) == before
        change(value)
    assert read(value) == after


def test_a_function_that_counts():
    block = nn.Linear(2, 2)
    block.count = counter_in_a_cell()
    containers = Containers(block, ((), {}))
    assert block.count() == 1
    with containers.in_place():
        assert block.count() == 1
    assert block.count() == 2


@pytest.mark.parametrize(
    "value",
    [numpy.int64(3), numpy.float32(1), numpy.array(2.0), random.SystemRandom()],
    ids=["integer", "float", "array", "random"],
)
def test_objects_that_are_only_looked_at(value: Any):
    block = nn.Linear(2, 2)
    block.state = value
    assert Containers(block, ((), {})).changed() is None


def test_objects_that_are_too_many_are_an_obstacle():
    """What the first ones of them hide could change in forward: a recomputation would change it once more."""
    block = nn.Linear(2, 2)
    block.vocabulary = {number: (number,) for number in range(30)}
    block.calls = []
    assert Containers(block, ((), {}), most=20).changed() == "structure of too many objects to look at"
    assert Containers(block, ((), {}), most=1000).changed() is None
    containers = Containers(block, ((), {}))
    block.calls.append(1)
    with containers.in_place():
        assert block.calls == []
    assert block.calls == [1]


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(input=x)
        return x.square().mean()


def test_arguments_by_keyword_are_not_held():
    """They stay as long as PyTorch's own checkpoint holds them, and no longer because of what is noted."""
    x = torch.randn(3, 4, requires_grad=True)
    containers = Containers(nn.Linear(2, 2), ((x,), {"y": x}))
    assert all(container is not x for container, _ in containers._before)
    assert not any(x is each for _, contents in containers._before for each in contents)


def test_a_forward_without_a_backward_is_no_part_of_a_surveyed_step():
    model = ByKeyword()
    with torchoffload.fit(model, 1 << 50, move=False, blocks="blocks.*") as handle:
        for step in range(8):
            loss = model(torch.randn(8, 64, requires_grad=True))
            if step != 1:
                loss.backward()
            del loss
        assert handle._driver.step is not None
        assert len(handle._driver.step.calls) == 4
