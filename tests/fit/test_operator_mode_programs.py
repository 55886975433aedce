"""Programs of all kinds under a mode in Python and under one that shows operators to a listener."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from noted_operators import InPython, make_listener
from operator_programs import PROGRAMS
from torchoffload._core import core
from torchoffload._pytorch.operator_mode import OperatorMode, obstacle

if not hasattr(core, "testing"):
    pytest.skip("needs the test build's listener", allow_module_level=True)


@pytest.fixture(params=["without Python", "through Python"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """By which way operators come to the listener."""
    assert obstacle() is None, "this torch is known"
    if request.param == "through Python":
        core.remove_interpreter_delegate()
    yield request.param
    core.install_interpreter_delegate()


def run(program: Any, mode: Any = None) -> list[Any]:
    """Return results, gradient and a random number afterwards."""
    torch.manual_seed(3)
    x = torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_()
    if mode is None:
        results = tree_leaves(program(x))
    else:
        with mode:
            results = tree_leaves(program(x))
    for each in results:
        if isinstance(each, torch.Tensor) and each.requires_grad:
            each.float().sum().backward(retain_graph=True)
    return [*results, x.grad, torch.rand(1)]


def assert_same_bits(ones: list[Any], others: list[Any]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_listener_is_shown_what_a_mode_in_python_is(name: str, way: str):
    program = PROGRAMS[name]
    stock = run(program)
    in_python = InPython()
    run(program, in_python)
    listener = make_listener()
    before = core.operators_by_python()
    shown = run(program, OperatorMode(listener.listener()))
    assert listener.names == in_python.names
    assert [each[0] for each in listener.regions] == in_python.others
    assert len(listener.names) > 0
    assert_same_bits(stock, shown)
    if way == "without Python" and name not in {"wrapper_subclass", "jagged", "fake_tensors", "traced"}:
        assert core.operators_by_python() == before


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_listener_calls_is_not_shown_to_it(name: str):
    plain, busy = make_listener(), make_listener(calls_more=True)
    shown = run(PROGRAMS[name], OperatorMode(plain.listener()))
    more = run(PROGRAMS[name], OperatorMode(busy.listener()))
    assert busy.names == plain.names
    assert_same_bits(shown, more)
