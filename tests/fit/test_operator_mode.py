"""A mode that shows operators to a listener sees what a mode in Python sees, and leaves all else as it was."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from noted_operators import InPython, make_listener
from operator_programs import PROGRAMS, linear
from torchoffload._core import core
from torchoffload._pytorch import operator_mode
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


def leaf() -> torch.Tensor:
    return torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_()


def test_pytorch_has_released_the_gil_where_a_listener_is_called():
    listener = make_listener()
    with OperatorMode(listener.listener()):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2)).add_(1)
    assert listener.names[-2:] == ["aten::mm", "aten::add_.Tensor"]
    assert not listener.held_gil


# ---- other modes ----


def test_modes_in_modes_are_each_shown_what_passes_them():
    outer, inner = make_listener(), make_listener()
    x = torch.ones(2)
    with OperatorMode(outer.listener()):
        x.sin()
        with OperatorMode(inner.listener()):
            x.cos()
            with InPython() as innermost:
                x.tan()
        x.exp()
    assert innermost.names == ["aten::tan"]
    assert inner.names == ["aten::cos", "aten::tan"]
    assert outer.names == ["aten::sin", "aten::cos", "aten::tan", "aten::exp"]


def test_a_mode_in_python_beneath_and_above_sees_all_operators():
    listener = make_listener()
    with InPython() as beneath, OperatorMode(listener.listener()), InPython() as above:
        linear()(leaf()).neg()  # whose output is not saved
    assert above.names == listener.names == beneath.names
    assert "aten::neg" in above.names


def test_flops_are_counted_beside_a_listener():
    listener = make_listener()
    with FlopCounterMode(display=False) as around, OperatorMode(listener.listener()):
        linear()(leaf()).sum().backward()
    with OperatorMode(listener.listener()), FlopCounterMode(display=False) as inside:
        linear()(leaf()).sum().backward()
    with FlopCounterMode(display=False) as alone:
        linear()(leaf()).sum().backward()
    assert around.get_total_flops() == inside.get_total_flops() == alone.get_total_flops() > 0


def test_two_modes_may_share_a_listener_and_one_mode_may_be_entered_twice():
    listener = make_listener()
    mode = OperatorMode(listener.listener())
    x = torch.ones(2)
    with mode, mode:
        x.sin()
    with mode, OperatorMode(listener.listener()):
        x.cos()
    assert listener.names == ["aten::sin"] * 2 + ["aten::cos"] * 2


def test_an_operator_in_python_may_enter_a_mode_of_its_own():
    inner = make_listener()
    with torch.library._scoped_library("torchoffload_operator_mode_inner", "DEF") as library:
        library.define("entering(Tensor x) -> Tensor")

        def entering(x: torch.Tensor) -> torch.Tensor:
            with OperatorMode(inner.listener()):
                return x.sin() + 1

        library.impl("entering", entering, "CompositeExplicitAutograd")
        outer = make_listener()
        with OperatorMode(outer.listener()):
            y = torch.ops.torchoffload_operator_mode_inner.entering(torch.ones(2))
    assert outer.names[-1] == "torchoffload_operator_mode_inner::entering"
    assert inner.names == ["aten::sin", "aten::add.Tensor"]
    torch.testing.assert_close(y, torch.ones(2).sin() + 1, rtol=0, atol=0)


def test_a_fake_mode_around_hides_the_operators_and_the_mode_works_again_after_it():
    listener = make_listener()
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), OperatorMode(listener.listener()):
        y = torch.ones(2).sin()
    assert listener.names == []
    assert type(y).__name__ == "FakeTensor"
    with OperatorMode(listener.listener()):
        y * 2  # a fake tensor outside of its mode
        torch.ones(2)
    assert listener.names == ["aten::ones"]


# ---- errors ----


class OwnError(Exception):
    pass


def test_an_operators_error_passes_through_and_the_mode_stays_on():
    listener = make_listener()
    depth = torch._C._len_torch_dispatch_stack()
    x = torch.ones(2, 3)
    with InPython() as beneath, OperatorMode(listener.listener()), OperatorMode(listener.listener()):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(x, x)
        with pytest.raises(IndexError):
            x.select(5, 0)
        x.sin()
        assert torch._C._len_torch_dispatch_stack() == depth + 3
    assert torch._C._len_torch_dispatch_stack() == depth
    assert listener.names == ["aten::mm"] * 2 + ["aten::select.int"] * 2 + ["aten::sin"] * 2
    assert beneath.names == ["aten::mm", "aten::select.int", "aten::sin"]


def test_an_exception_of_python_is_the_same_object_on_the_other_side():
    error = OwnError("own")

    def failing(x: torch.Tensor) -> torch.Tensor:
        raise error

    with torch.library._scoped_library("torchoffload_operator_mode_failing", "DEF") as library:
        library.define("failing(Tensor x) -> Tensor")
        library.impl("failing", failing, "CompositeExplicitAutograd")
        listener = make_listener()
        with OperatorMode(listener.listener()):
            with pytest.raises(OwnError) as caught:
                torch.ops.torchoffload_operator_mode_failing.failing(torch.ones(2))
            torch.ones(2).sin()
    assert caught.value is error
    assert listener.names[-1] == "aten::sin"


def test_a_listener_may_refuse_an_operator():
    listener = make_listener(throws_at=2)
    depth = torch._C._len_torch_dispatch_stack()
    x = torch.ones(2)
    with OperatorMode(listener.listener()):
        x.sin()
        with pytest.raises(RuntimeError, match="the listener refuses aten::cos"):
            x.cos()
        x.tan()
    assert listener.names == ["aten::sin", "aten::cos", "aten::tan"]
    assert torch._C._len_torch_dispatch_stack() == depth


def test_a_mode_takes_a_listener_and_nothing_else():
    for wrong in (None, 3, make_listener()):
        with pytest.raises(TypeError, match="the capsule of one listener"):
            OperatorMode(wrong)


# ---- what is no operator of C++ ----


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,))


def test_an_operator_that_takes_functions_is_an_opaque_region():
    listener = make_listener()
    x = torch.ones(3)
    with OperatorMode(listener.listener()):
        y = branch(x)
        z = y + 1
    assert listener.regions == [("cond", 2, 1)]
    assert "aten::sin" not in listener.names
    assert listener.names[-1] == "aten::add.Tensor"
    torch.testing.assert_close(z, x.sin() + 1, rtol=0, atol=0)


def test_a_class_may_call_such_an_operator_by_itself():
    others: list[Any] = []

    class Mode(OperatorMode):
        def on_other(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            others.append(func)
            return func(*args, **(kwargs or {}))

    listener = make_listener()
    with Mode(listener.listener()):
        branch(torch.ones(3))
    assert others == [torch.ops.higher_order.cond]
    assert listener.regions == []


def call_of(function: Any) -> Any:
    """An object of a class whose method `__call__` is an opaque one for `function`."""
    return type("Region", (), {"__call__": core.opaque_method(function, "a region")})()


def test_an_error_in_a_region_passes_through():
    listener = make_listener()

    def failing(_: object, x: torch.Tensor) -> torch.Tensor:
        raise OwnError

    call = call_of(failing)
    with OperatorMode(listener.listener()):
        with pytest.raises(OwnError):
            call(torch.ones(2))
        torch.ones(2)
    assert listener.regions == []
    assert listener.names == ["aten::ones", "aten::ones"]


def test_a_region_frees_its_inputs_as_it_goes():
    def region(_: object, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        watch = weakref.ref(inputs[0])
        inputs.clear()
        assert watch() is None
        return [torch.zeros(1)]

    call = call_of(region)
    listener, outer = make_listener(), make_listener()
    with OperatorMode(outer.listener()), OperatorMode(listener.listener()):
        (y,) = call([torch.ones(2), torch.ones(3)])
        y.sin()
    assert listener.regions == outer.regions == [("a region", 2, 1)]
    assert listener.names == outer.names == ["aten::ones", "aten::ones", "aten::sin"]
    with InPython() as seen:
        call([torch.ones(2)])
    assert seen.names == ["aten::ones", "aten::zeros"]  # nothing changes for other modes


# ---- threads and lifetime ----


def test_each_thread_is_shown_its_own_operators():
    barrier = threading.Barrier(2)
    listeners = [make_listener(), make_listener()]

    def work(number: int) -> None:
        with OperatorMode(listeners[number].listener()):
            barrier.wait()
            for _ in range(50):
                (torch.sin if number else torch.cos)(torch.ones(2))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listeners[0].names == ["aten::ones", "aten::cos"] * 50
    assert listeners[1].names == ["aten::ones", "aten::sin"] * 50


def test_a_thread_that_is_given_the_mode_runs_unseen():
    listener = make_listener()
    results: list[torch.Tensor] = []
    with OperatorMode(listener.listener()):
        torch.ones(2).sin()
        core.testing.in_thread_with_state(lambda: results.append(torch.ones(3).cos().exp()))
        torch.ones(2).tan()
    assert listener.names == ["aten::ones", "aten::sin", "aten::ones", "aten::tan"]
    torch.testing.assert_close(results[0], torch.ones(3).cos().exp(), rtol=0, atol=0)


def test_nothing_holds_a_mode_that_is_left():
    listener = make_listener()
    alive = weakref.ref(listener)
    mode = OperatorMode(listener.listener())
    with mode:
        y = leaf().exp().tanh()
    watch = weakref.ref(mode)
    gc.disable()
    try:
        del mode
        assert watch() is None
        del listener
        assert alive() is None
    finally:
        gc.enable()
    y.sum().backward()


def test_saved_outputs_still_notice_a_write():
    listener = make_listener()
    with OperatorMode(listener.listener()):
        y = leaf().exp()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- the test of itself ----


def test_a_torch_that_behaves_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch):
    core.remove_interpreter_delegate()
    monkeypatch.setattr(core, "install_interpreter_delegate", lambda: None)
    operator_mode._tested.cache_clear()
    try:
        text = obstacle()
        assert text is not None
        assert "by way of Python" in text
        assert "operators came that way all the same" in text
        listener = make_listener()
        with OperatorMode(listener.listener()):
            torch.ones(2).sin()
        assert listener.names == ["aten::ones", "aten::sin"]
    finally:
        monkeypatch.undo()
        operator_mode._tested.cache_clear()


def test_the_test_of_itself_shows_nothing_to_what_the_caller_has_on():
    packed: list[torch.Tensor] = []
    operator_mode._tested.cache_clear()
    with (
        InPython() as seen,
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: None),
    ):
        state = torch.get_rng_state()
        seen.names.clear()
        assert obstacle() is None
        assert seen.names == []
        assert packed == []
        assert torch.equal(state, torch.get_rng_state())


# ---- programs of all kinds, under a mode in Python and under one that shows operators to a listener ----


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
    run(PROGRAMS[name])  # PyTorch calls more operators for the first nested tensor of a process
    plain, busy = make_listener(), make_listener(calls_more=True)
    shown = run(PROGRAMS[name], OperatorMode(plain.listener()))
    more = run(PROGRAMS[name], OperatorMode(busy.listener()))
    assert busy.names == plain.names
    assert_same_bits(shown, more)
