"""A forward that fills caches outside of the model: a dry run of it leaves no tensor without data in any of them."""

import collections
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize

from torchoffload._fit.choosing.dry_run import dry_run

WIDTH = 8
in_dict: dict[int, Any] = {}
in_default: collections.OrderedDict[int, Any] = collections.OrderedDict()
in_list: list[torch.Tensor] = []
in_queue: collections.deque[torch.Tensor] = collections.deque(maxlen=3)
in_global: torch.Tensor | None = None


def table(length: int) -> torch.Tensor:
    return torch.arange(length)[:, None].sin() * torch.ones(WIDTH)


def from_dict(length: int) -> torch.Tensor:
    if length not in in_dict:
        in_dict[length] = table(length)
    return in_dict[length]


def from_tuples_in_dict(length: int) -> torch.Tensor:
    if length not in in_default:
        in_default[length] = (table(length), (table(length), 1))
    return in_default[length][1][0]


class Rotary:
    tables: dict[int, torch.Tensor] = {}  # noqa: RUF012 (as programs have it)

    @classmethod
    def get(cls, length: int) -> torch.Tensor:
        return cls.tables.setdefault(length, table(length))


@functools.cache
def remembered(length: int) -> torch.Tensor:
    return table(length)


@functools.lru_cache(maxsize=2)
def remembered_twice(length: int) -> tuple[torch.Tensor, int]:
    return table(length), length


def from_list(length: int) -> torch.Tensor:
    in_list.append(table(length))
    return in_list[-1]


def from_queue(length: int) -> torch.Tensor:
    in_queue.append(table(length))
    return in_queue[-1]


def from_global(length: int) -> torch.Tensor:
    global in_global
    if in_global is None:
        in_global = table(length)
    return in_global


class Uses(nn.Module):
    def __init__(self, get: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.get, self.layer = get, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(x) * self.get(x.shape[0]))


CACHES: dict[str, Callable[[int], torch.Tensor]] = {
    "a dict": from_dict,
    "tuples in a dict": from_tuples_in_dict,
    "a dict of a class": Rotary.get,
    "a cache": remembered,
    "a cache of bounded size": lambda length: remembered_twice(length)[0],
    "a list": from_list,
    "a queue": from_queue,
    "a global variable": from_global,
}


@pytest.fixture(autouse=True)
def _empty_caches():
    global in_global
    for cache in (in_dict, in_default, Rotary.tables, in_list, in_queue):
        cache.clear()
    in_global = None
    remembered.cache_clear()
    remembered_twice.cache_clear()
    yield
    if gc.get_freeze_count() == 0:  # as conftest.py had it
        gc.collect()
        gc.freeze()


@pytest.mark.parametrize("name", CACHES)
def test_nothing_stays_in_caches(name: str):
    model, x = Uses(CACHES[name]), torch.randn(5, WIDTH)
    for _ in range(2):
        assert dry_run(model, (x,), {}).saves
    y = model(x)
    assert not isinstance(y, FakeTensor)
    assert torch.equal(y, torch.sin(model.layer(x) * table(5)))
    assert len(in_list) == (name == "a list")
    assert len(in_queue) == (name == "a queue")


@pytest.mark.parametrize("name", [name for name in CACHES if name != "a global variable"])
def test_what_was_in_caches_stays(name: str):
    model = Uses(CACHES[name])
    before = model(torch.zeros(4, WIDTH))
    dry_run(model, (torch.randn(5, WIDTH),), {})
    if name == "a dict":
        assert list(in_dict) == [4]
    if name == "a list":
        assert len(in_list) == 1
    assert torch.equal(model(torch.zeros(4, WIDTH)), before)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def test_nothing_stays_in_the_cache_of_parametrizations():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    with parametrize.cached():
        dry_run(model, (torch.randn(5, WIDTH),), {})
        y = model(torch.randn(5, WIDTH))
    assert not isinstance(y, FakeTensor)
    y.sum().backward()
    assert not isinstance(model[0].parametrizations.weight.original.grad, FakeTensor)


class Keeps:
    table: torch.Tensor | None = None

    @classmethod
    def get(cls, length: int) -> torch.Tensor:
        if cls.table is None:
            cls.table = table(length)
        return cls.table


def test_one_that_cannot_be_taken_out_is_an_error_and_never_used():
    """What an attribute of an object was before is not known."""
    model = Uses(Keeps.get)
    try:
        dry_run(model, (torch.randn(5, WIDTH),), {})
        with pytest.raises(RuntimeError, match=r"in fit's dry run is used after it.*blocks="):
            model(torch.randn(5, WIDTH))
    finally:
        Keeps.table = None
    assert not isinstance(model(torch.randn(5, WIDTH)), FakeTensor)
