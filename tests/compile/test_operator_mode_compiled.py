"""Modes that show operators, beside torch.compile: regions are opaque, and nothing is compiled again."""

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from places import ROOT
from torchoffload._core import core
from torchoffload._pytorch.operator_mode import OperatorMode, obstacle

if not hasattr(core, "testing"):
    pytest.skip("needs the test build's listener", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("operator_mode_compiled")]


@pytest.fixture(params=["without Python", "through Python"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """By which way operators come to the listener."""
    assert obstacle() is None
    if request.param == "through Python":
        core.remove_interpreter_delegate()
    yield request.param
    core.install_interpreter_delegate()


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def seen(call: Callable[[], Any]) -> tuple[Any, Any]:
    listener = core.testing.NotingListener()
    with OperatorMode(listener.listener()):
        result = call()
    return listener, result


WEIGHT = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
X = torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_()


def region(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ WEIGHT) * x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.detach() / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x @ self.weight)


def gradients(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y.sum(), (WEIGHT, X))


def assert_same(ones: Any, others: Any) -> None:
    torch.testing.assert_close(ones, others, rtol=0, atol=0)


# In PyTorch 2.9 any mode, also one in Python, has what was compiled without it compiled once more.
no_more_graphs = pytest.mark.skipif(
    not hasattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals"),
    reason="this torch compiles once more below any TorchDispatchMode",
)


@no_more_graphs
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_region_of_inductor_is_opaque(compiled_first: bool):
    compiled = torch.compile(region, fullgraph=True)
    x = X

    def block() -> torch.Tensor:
        return torch.tanh(compiled(x) * 2)

    if compiled_first:
        block()
        assert graphs() == (1, 0)
    for _ in range(2):
        listener, y = seen(block)
        assert [(inputs, outputs > 0) for _, inputs, outputs in listener.regions] == [(2, True)]
        assert "CompiledFxGraph" in listener.regions[0][0]
        assert [name for name in listener.names if name in {"aten::mm", "aten::sin"}] == []
        assert listener.names[-2:] == ["aten::mul.Tensor", "aten::tanh"]
        assert graphs() == (1, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        stock = block()
        assert_same(y, stock)
        assert_same(gradients(y), gradients(stock))
        seen(block)
    assert graphs() == (1, 0)


@no_more_graphs
def test_the_operators_of_another_backend_are_shown():
    compiled = torch.compile(region, backend="aot_eager", fullgraph=True)
    x = X
    stock = compiled(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        listener, y = seen(lambda: compiled(x))
    assert {"aten::mm", "aten::sin", "aten::mul.Tensor"} <= set(listener.names)
    assert listener.regions == []
    assert graphs() == (1, 0)
    assert_same(gradients(y), gradients(stock))


@no_more_graphs
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_of_all_forms_are_not_compiled_again(backend: str):
    in_place, wrapped = Layer(), Layer()
    in_place.compile(backend=backend)
    outer = torch.compile(wrapped, backend=backend)
    x = X

    def block() -> torch.Tensor:
        return outer(in_place(x).relu()).sum()

    first = block()
    before = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            listener, y = seen(block)
            assert_same(y, first)
            assert_same(block(), first)
    assert graphs() == before
    assert listener.names.count("aten::relu") == 1
    assert len(listener.regions) == (2 if backend == "inductor" else 0)


class InPython(TorchDispatchMode):
    """Passes each operator on."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_ours_compiles_no_more_than_one_in_python():
    def counts(around: Callable[[], contextlib.AbstractContextManager[Any]]) -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(region)
        for rows in (4, 5, 6, 4, 7):
            compiled(torch.ones(rows, 8))
            with around():
                compiled(torch.ones(rows, 8))
        return graphs()

    listener = core.testing.NotingListener()
    assert counts(lambda: OperatorMode(listener.listener())) == counts(InPython)
    assert len(listener.regions) == 5


@no_more_graphs
def test_a_compiled_model_with_a_graph_break_inside_of_a_mode():
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = region(x)
        torch._dynamo.graph_break()
        return y.exp().sum()

    compiled = torch.compile(broken)
    x = X
    stock = compiled(x)
    before = graphs()
    listener, y = seen(lambda: compiled(x))
    assert graphs() == before
    assert len(listener.regions) == 2
    assert_same(y, stock)


def test_a_mode_that_is_entered_in_a_frame_that_dynamo_left_to_the_interpreter():
    listener = core.testing.NotingListener()

    @torch._dynamo.disable(recursive=False)
    def eager(x: torch.Tensor) -> torch.Tensor:
        with OperatorMode(listener.listener()):
            return torch.add(x, 1).mul_(2)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return eager(x.sin()).cos()

    compiled = torch.compile(whole)
    first = compiled(torch.ones(3))
    before = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(compiled(torch.ones(3)), first)
    assert graphs() == before
    assert listener.names == ["aten::add.Tensor", "aten::mul_.Tensor"] * 2
    assert_same(first, ((torch.ones(3).sin() + 1) * 2).cos())


def test_an_inductor_that_is_imported_inside_of_a_mode_is_known():
    program = """
        import sys
        import torch
        from torchoffload._core import core
        from torchoffload._pytorch.operator_mode import OperatorMode

        counter = core.counting_listener()
        with OperatorMode(counter):
            assert "torch._inductor.output_code" not in sys.modules
            torch.compile(lambda x: (x @ x).sin() + 1)(torch.ones(3, 3))
        operators, regions = core.counted(counter)
        assert regions == 1, regions
        import importlib, inspect, torch._inductor.output_code as module
        assert "class CompiledFxGraph" in inspect.getsource(module)
        print(operators)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2  # ones(), and what torch.compile may do around the region
