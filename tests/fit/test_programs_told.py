"""Programs that fit could pass by without a word: it sees their steps, or says why it does nothing."""

import copy
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from fitted_models import options_of
from fitted_programs import LEAST, WIDTH, Loop, Mlp, Net, Way, assert_as_stock, net
from torchoffload._fit.model import fitted_model

pytestmark = pytest.mark.devices("disk")
each_way = pytest.mark.parametrize("way", LEAST, ids=map(str, LEAST))


class Holds:
    def __init__(self, value: Any) -> None:
        self.value = value


class HoldsInSlot:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Returns(Net):
    """Returns its output in some form; what the loop does with that is its loss."""

    def __init__(self, wrap: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self, super().forward(x))


def keep(model: Any, y: torch.Tensor) -> None:
    model.loss = y.square().mean()


def keep_and_log(model: Any, y: torch.Tensor) -> dict[str, Any]:
    keep(model, y)
    return {"loss": float(model.loss.detach()), "logs": model.loss.detach()}


OUTPUTS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any, Any], torch.Tensor]]] = {
    "a list of objects": (
        lambda model, y: [Holds(each) for each in y.split(2)],
        lambda model, out: sum(each.value.square().mean() for each in out),
    ),
    "an object in an object": (
        lambda model, y: Holds(Holds(y)),
        lambda model, out: out.value.value.square().mean(),
    ),
    "an object with slots": (lambda model, y: HoldsInSlot(y), lambda model, out: out.value.square().mean()),
    "nothing": (keep, lambda model, out: model.loss),
    "numbers and detached tensors": (keep_and_log, lambda model, out: model.loss),
}


@each_way
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_steps_are_seen_whatever_the_model_returns(device_under_test: Device, way: Way, kind: str, recompute: bool):
    if not (recompute or way.moves):
        pytest.skip("nothing is left to plan")
    wrap, loss = OUTPUTS[kind]

    def program(loop: Loop) -> None:
        loop.train(loop.make(lambda: Returns(wrap)), steps=30, call=lambda model, x: loss(model, model(x)))

    outcome = assert_as_stock(
        program, device_under_test, way, recompute=recompute, obstacle=None if recompute else "recompute=False"
    )
    assert outcome.phases == ["settled"], outcome.reports


class BackwardInside(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x).square().mean()
        loss.backward()
        return loss.detach()


@each_way
def test_a_backward_inside_of_the_forward(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(BackwardInside)
        for _ in range(30):
            loop.ends_step(model, loss=model(loop.batch()))
            model.zero_grad()

    outcome = assert_as_stock(program, device_under_test, way)
    assert outcome.phases == ["settled"], outcome.reports


@each_way
def test_one_loss_that_is_kept_and_never_gone_back_through(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model, kept = loop.make(Net), []
        for step in range(40):
            loss = model(loop.batch()).square().mean()
            if step == 2:
                kept.append(loss)
                continue
            loss.backward()
            loop.ends_step(model)
            model.zero_grad()

    outcome = assert_as_stock(program, device_under_test, way)
    assert outcome.phases == ["settled"], outcome.reports


def told(device: Device, model: Any, step: Callable[[Any], None], count: int = 24) -> tuple[list[str], str]:
    """The warnings of fit in some steps, and its report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torchoffload.fit(model, 1 << 50, **options_of(device)) as handle:
            for _ in range(count):
                step(model)
            report = handle.report()
    return [str(each.message) for each in caught if "torchoffload" in str(each.message)], report


def plain_step(model: Any) -> None:
    model(torch.ones(4, 8, WIDTH)).square().mean().backward()


def step_under_hooks(model: Any) -> None:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = model(torch.ones(4, 8, WIDTH))
    y.square().mean().backward()


def step_without_hooks(model: Any) -> None:
    with disable_saved_tensors_hooks("none here"):
        y = model(torch.ones(4, 8, WIDTH))
    y.square().mean().backward()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (step_under_hooks, "other hooks on saved tensors around their calls"),
        (step_without_hooks, "are disabled around"),
    ],
)
def test_why_nothing_is_done_under_the_hooks_of_others(device_under_test: Device, step, why: str):
    warned, report = told(device_under_test, Net(), step)
    assert len(warned) == 1
    assert "fit does nothing in 6 of 6 blocks (first, blocks.0, blocks.1, ...)" in warned[0]
    assert why in warned[0]
    assert why in report


class Checkpoints(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_programs_around_chosen_blocks(device_under_test: Device, reentrant: bool):
    def step(model: Any) -> None:
        plain_step(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Checkpoints(reentrant=reentrant)
        with torchoffload.fit(model, 1 << 50, blocks="blocks.*", **options_of(device_under_test)) as handle:
            for _ in range(24):
                step(model)
            report = handle.report()
    warned = [str(each.message) for each in caught if "torchoffload" in str(each.message)]
    assert len(warned) == 1
    assert "checkpoints" in warned[0]
    assert "fit does nothing in 4 of 4 blocks (blocks.0, blocks.1, blocks.2, ...)" in report


class CallsForward(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


def test_blocks_that_are_not_called_as_modules(device_under_test: Device):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = CallsForward()
        with torchoffload.fit(model, 1 << 50, blocks="blocks.*", **options_of(device_under_test)) as handle:
            for _ in range(24):
                plain_step(model)
            report = handle.report()
    warned = [str(each.message) for each in caught if "torchoffload" in str(each.message)]
    assert len(warned) == 1
    assert "no call of them was seen" in warned[0]
    assert "block.forward(x) is not" in report


class WritesUnseen(torch.autograd.Function):
    """tanh by code that PyTorch does not see, as a kernel of Triton is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        numpy.tanh(x.numpy(), out=out.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * (1 - out * out)


class OfKernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.exp(WritesUnseen.apply(self.up(x))))


@each_way
def test_what_kernels_write_that_pytorch_does_not_see_is_told(device_under_test: Device, way: Way):
    outcome = assert_as_stock(net(OfKernels), device_under_test, way)
    assert "of each OfKernels stay or move, since they would come out differently" in outcome.reports[0]
    assert "what empty_like made" in outcome.reports[0]
    assert "torch.library.triton_op" in outcome.reports[0]


def test_a_backward_that_never_comes(device_under_test: Device):
    model = Net()
    model.requires_grad_(False)
    warned, report = told(device_under_test, model, lambda model: model(torch.ones(4, 8, WIDTH)))
    assert len(warned) == 1
    assert "the backward of none of the last calls of Net was seen" in warned[0]
    assert "the backward of none of the last calls of Net was seen" in report


def test_a_copy_of_the_model_is_trained(device_under_test: Device):
    copies: list[Any] = []

    def step(model: Any) -> None:
        if not copies:
            copies.append(copy.deepcopy(model))
        plain_step(copies[0])

    warned, report = told(device_under_test, Net(), step)
    assert not warned
    assert "no call of this Net with gradients was seen yet" in report


# Threads of the program.


@each_way
def test_what_other_threads_append_is_not_lost(device_under_test: Device, way: Way):
    """A thread appends to a list that blocks hold, and another one takes the model's state, while the model trains."""
    events: list[int] = []
    counts = [0]
    failures: list[BaseException] = []

    class Monitored(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.monitor = Holds(events)

    def program(loop: Loop) -> None:
        events.clear()
        counts[0] = 0
        model = loop.make(lambda: Net(Monitored))
        names = set(model.state_dict())
        stop = threading.Event()

        def append() -> None:
            try:
                while not stop.wait(1e-4):
                    events.append(counts[0])
                    counts[0] += 1
                    assert set(model.state_dict()) == names
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=append)
        thread.start()
        try:
            loop.train(model, steps=30)
        finally:
            stop.set()
            thread.join()

    assert_as_stock(program, device_under_test, way)
    assert not failures
    assert events == list(range(counts[0]))


def test_two_threads_train_one_model(device_under_test: Device):
    """As Hogwild does: values race, but nothing fails."""

    class Notes(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            self.seen = h.detach().mean()
            return x + self.down(torch.sin(h))

    model = Net(Notes)
    failures: list[BaseException] = []
    with torchoffload.fit(model, 1 << 50, move=False, on_unfit="warn") as handle:
        for _ in range(12):
            plain_step(model)
        assert handle.phase == "settled"
        handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)

        def work() -> None:
            try:
                for _ in range(40):
                    plain_step(model)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, "".join(traceback.format_exception(failures[0]))


def test_a_call_on_another_thread_waits_until_a_plan_is_made(
    device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    """It begins a step, and so would take the calls of the surveyed one away from the plan that is made of them."""
    model = Net(Mlp)
    threads: list[threading.Thread] = []
    is_in_block, may_go_on = threading.Event(), threading.Event()
    surveyed_step = fitted_model.surveyed_step

    def wait_on_another_thread(*_: Any) -> None:
        if threads and threading.current_thread() is threads[0]:
            is_in_block.set()
            may_go_on.wait(10)

    def surveyed_meanwhile(*arguments: Any) -> Any:
        found = surveyed_step(*arguments)
        if not threads:
            threads.append(threading.Thread(target=plain_step, args=(model,)))
            threads[0].start()
            is_in_block.wait(0.5)
        return found

    monkeypatch.setattr(fitted_model, "surveyed_step", surveyed_meanwhile)
    model.blocks[1].register_forward_pre_hook(wait_on_another_thread)
    with torchoffload.fit(model, 1 << 50, move=False):
        for _ in range(8):
            plain_step(model)
            if threads:
                may_go_on.set()
        threads[0].join()


def test_what_a_block_can_reach_costs_nothing(device_under_test: Device):
    """A recomputation looks at no objects of the program's: a block may hold a vocabulary of any size."""

    class Looked(dict[str, int]):
        looks = 0

        def items(self) -> Any:
            type(self).looks += 1
            return super().items()

        def __iter__(self) -> Any:
            type(self).looks += 1
            return super().__iter__()

        def values(self) -> Any:
            type(self).looks += 1
            return super().values()

    class Configured(Mlp):
        def __init__(self, vocabulary: Any) -> None:
            super().__init__()
            self.vocabulary = Holds(vocabulary)

    vocabulary = Looked((str(number), number) for number in range(1000))
    model = Net(lambda: Configured(vocabulary))
    with torchoffload.fit(model, 1 << 50, blocks="blocks.*", move=False) as handle:
        for _ in range(14):
            plain_step(model)
        handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)
        before = Looked.looks
        for _ in range(10):
            plain_step(model)
    assert Looked.looks == before


class Stops(Mlp):
    stop: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if Stops.stop is not None:
            raise Stops.stop("planted")
        return y


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
@pytest.mark.parametrize("way", LEAST, ids=map(str, LEAST))
def test_exceptions_of_every_kind_in_a_block(device_under_test: Device, way: Way, stop: type[BaseException]):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: Net(Stops))
        for step in range(24):
            if step in {1, 3, 8, 20}:
                Stops.stop = stop
                try:
                    with pytest.raises(stop):
                        model(loop.batch())
                finally:
                    Stops.stop = None
                # What the program does next: it evaluates, and trains another model.
                with torch.no_grad():
                    model(loop.batch())
                nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
                assert torch._C._len_torch_dispatch_stack() == 0
                assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            model(loop.batch()).square().mean().backward()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


@pytest.mark.parametrize("when", ["remove", "replan", "fit again", "remove in forward"])
def test_a_handle_that_changes_between_forward_and_backward(device_under_test: Device, when: str):
    def program(loop: Loop) -> None:
        model = loop.make(Net)
        for step in range(20):
            handle = loop.handles[-1] if loop.handles else None
            changes = handle is not None and step == 15
            hook = None
            if changes and when == "remove in forward":
                hook = model.blocks[1].register_forward_hook(lambda *_: handle.remove())
            loss = model(loop.batch()).square().mean()
            if hook is not None:
                hook.remove()
            if changes and when in ("remove", "fit again"):
                handle.remove()
            if changes and when == "fit again":
                loop.fit(model)
            if changes and when == "replan":
                handle.replan(1 << 50)
            loss.backward()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, LEAST[0], is_computed_again=False)
