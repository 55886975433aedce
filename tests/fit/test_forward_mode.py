"""The mode of a planned block's forward notes each operator as a mode that is written in Python does."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchoffload._core import core
from torchoffload._fit import replay
from torchoffload._fit.blocks import plan_block
from torchoffload._fit.graph import BlockPlan
from torchoffload._fit.operators import is_counted
from torchoffload._fit.replay import Call, Forward, Mode, Watch

ATEN = torch.ops.aten


class InPython(Mode):  # type: ignore[no-untyped-call]
    """Notes each operator by a call of Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._call.runs.open:
            return output
        if is_counted(func, args, self._call.inputs):
            self._call.note(func, output, args, kwargs or {})
        else:
            self._call.note_uncounted(func, output, (args, kwargs or {}))
        return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = self.norm(F.dropout(self.linear(x), 0.5))
        first, second = torch.cat([y, x.view(8, -1).t()]).exp().chunk(2)
        y = (first * second).to(torch.float64).sum(0, keepdim=True).to(torch.float32)
        y = torch.addmm(input=y, mat1=x, mat2=self.linear.weight).masked_fill_(x > 1, 0.0)
        return torch.stack(torch.split(y, [3, 5])[0:1]).sigmoid().mean()


def noted(make: Callable[[Call], Any], plan: BlockPlan) -> tuple[Call, list[Any], torch.Tensor]:
    """Run the block once. Returns its call, the operators that made storages that are noted, and the gradient."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(8, 8, requires_grad=True)
    call = Call(block, plan, None, ((x,), {}), Watch(plan))
    held: list[Any] = []
    with make(call), Holding(held):
        y = block(x)
    y.backward()
    assert x.grad is not None
    made = [name for name, storage in held if storage in call.made]
    return call, made, x.grad


class Holding(Mode):  # type: ignore[no-untyped-call]
    """Holds all outputs, so that no storage gets the address of another one, and names the operators of each."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._held, self._outputs = held, []  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._outputs.append(output)
        self._held += [(str(func), address) for address in sorted(core.storage_addresses(output) or ())]
        return output


def state_of(call: Call) -> Any:
    kept = {number: repr(type(each)) for number, each in call.kept.items()}
    return call.operators, call.left_at, kept, call.layouts, call.in_place, call.once, call.refusal


def all_operators() -> tuple[Any, ...]:
    call, _, _ = noted(InPython, BlockPlan(operators=()))
    return tuple(call.operators)


PLANS = {
    "nothing is planned": lambda operators: BlockPlan(operators=()),
    "nothing is kept": lambda operators: BlockPlan(operators=operators),
    "some are kept": lambda operators: BlockPlan(operators=operators, kept=frozenset(range(0, len(operators), 3))),
    "some are left out": lambda operators: BlockPlan(operators=operators, skipped=frozenset(range(2, 30, 4))),
    "it leaves the plan": lambda operators: BlockPlan(operators=(*operators[:9], ATEN.tan.default, *operators[10:])),
    "it goes on behind the plan": lambda operators: BlockPlan(operators=operators[:-5]),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_noted_is_what_a_mode_in_python_notes(name: str):
    operators = all_operators()
    assert len(operators) >= 15
    plan = PLANS[name](operators)
    (call, made, grad), (expected, expected_made, expected_grad) = noted(Forward, plan), noted(InPython, plan)
    assert state_of(call) == state_of(expected)
    assert made == expected_made
    assert torch.equal(grad, expected_grad)


def test_an_operator_of_which_the_plan_says_nothing_calls_no_python(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    def note(call: Call, operator: Any, *rest: Any) -> None:
        calls.append(operator)
        call.note(operator, rest[0], rest[1], rest[2])

    monkeypatch.setattr(replay, "_note", note)
    plan = BlockPlan(operators=(ATEN.exp.default, ATEN.sin.default, ATEN.mul.Tensor), kept=frozenset([1]))
    call = Call(nn.Linear(2, 2), plan, None, ((), {}), Watch(plan))
    x = torch.ones(4)
    with Forward(call):
        x.exp().view(2, 2).sin().t().mul(2)
    assert calls == [ATEN.sin.default]
    assert call.operators == list(plan.operators)
    assert list(call.kept) == [1]


def test_what_an_operator_raises_comes_through_and_is_not_noted():
    plan = BlockPlan(operators=(ATEN.mm.default,))
    call = Call(nn.Linear(2, 2), plan, None, ((), {}), Watch(plan))
    x = torch.ones(2, 3)
    with Forward(call), pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.mm(x, x)
    assert call.operators == []


def test_other_arguments_are_errors():
    call = Call(nn.Linear(2, 2), BlockPlan(operators=()), None, ((), {}), Watch(None))
    mode = Forward(call)
    with pytest.raises(TypeError, match="takes a function"):
        mode.__torch_dispatch__(ATEN.exp.default)
    with pytest.raises(TypeError, match="in a dict"):
        mode.__torch_dispatch__(ATEN.exp.default, (), (torch.ones(1),), 3)
    assert mode.__torch_dispatch__(ATEN.exp.default, (), [torch.zeros(1)]) == 1
    with pytest.raises(AttributeError):
        core.forward_notes(object(), (), b"", str, str)
    mode._notes = None
    with pytest.raises(ValueError, match="PyCapsule"):
        mode.__torch_dispatch__(ATEN.exp.default, (), (torch.ones(1),))


@pytest.fixture
def noise() -> Iterator[Any]:
    """An operator whose kernel is written in Python, and draws random numbers."""
    library = torch.library.Library("torchoffload_forward_mode", "DEF")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x * torch.rand_like(x), "CPU")
    torch.library.register_autograd("torchoffload_forward_mode::noise", lambda _, grad: grad, lib=library)
    yield torch.ops.torchoffload_forward_mode.noise
    library._destroy()


class Compiled(nn.Module):
    """A block of which a part is compiled, whose frame torch.compile leaves to the interpreter and goes on beneath."""

    def __init__(self, noise: Any, graphs: list[torch.fx.GraphModule]) -> None:
        super().__init__()

        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        def inner(x: torch.Tensor) -> torch.Tensor:
            for _ in range(1):
                torch._dynamo.graph_break()
                x = noise(x)
            return x.sin()

        self.inner = torch.compile(inner, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_nothing_that_an_operator_or_its_note_calls_is_compiled(noise: Any):
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    block, x = Compiled(noise, graphs), torch.randn(64, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    graphs.clear()
    torch._dynamo.reset()
    plan_block(block, BlockPlan(operators=()))
    torch.manual_seed(1)
    assert torch.equal(torch.autograd.grad(block(x).sum(), x)[0], expected)
    assert not any("rand" in graph.code for graph in graphs)
    assert not any("torchoffload" in str(graph.code) for graph in graphs)


def test_an_exception_that_a_block_keeps_does_not_keep_the_block():
    class Keeping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                torch._higher_order_ops.out_dtype(ATEN.mm.default, torch.int32, x.detach(), torch.ones(3, 3))
            except Exception as error:
                self.error = error
            return x.exp()

    block, x = Keeping(), torch.ones(2, 2, requires_grad=True)
    plan_block(block, BlockPlan(operators=()))
    block(x).sum().backward()
    assert block.error is not None
    alive = weakref.ref(block)
    del block
    gc.collect()
    assert alive() is None
