"""memory= of contexts and of offload_modules: what blocks save stays or moves by a plan."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from gradients import Run, assert_same_gradients
from planned_blocks import BLOCKS, WIDTH

ALL = 1 << 50
STEPS = 48

of_devices = pytest.mark.devices("disk", "simulated-late", "cuda")


def make_model() -> nn.Module:
    return Model(BLOCKS["transformer"])


def memory_for_least(handle: Any, device: Device) -> int:
    """The least memory that will do. PyTorch's allocator takes pieces of 20 MiB and more, in which all of this fits."""
    return ALL - 1 if device.name == "cuda" else int(handle.frontier()[0].memory_bytes / (1 - 0.04)) + 1


def train(run: Run, model: nn.Module, call: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = run.tensor(4, 8, WIDTH)
        optimizer.zero_grad()
        loss = call(x, step)
        loss.backward()
        run.check(loss=loss.detach(), gradients=[each.grad for each in model.parameters()])
        optimizer.step()


@of_devices
def test_a_context_that_is_made_anew_in_each_step_keeps_to_the_memory(device_under_test: Device):
    """With room for all nothing moves once the plan is settled, and with the least all does that can."""
    plans: dict[str, Any] = {}

    def program(run: Run) -> nn.Module:
        model = run.module(make_model)
        torch.manual_seed(3)
        given: dict[str, Any] = {"memory": ALL}
        handles = set()

        def call(x: torch.Tensor, step: int) -> torch.Tensor:
            if run.stock:
                return model(x)
            context = torchoffload.OffloadActivations(model=model, **given, **options_of(device_under_test))
            assert context.fitted is None
            with context:
                loss = model(x)
            handles.add(context.fitted)
            if "all" not in plans and context.fitted.phase == "settled":
                plans["all"] = context.fitted.plan
                given["memory"] = memory_for_least(context.fitted, device_under_test)
            plans["least"] = context.fitted.plan
            return loss

        train(run, model, call)
        if not run.stock:
            assert len(handles) == 1, "each context made another plan"
            (handle,) = handles
            assert handle.phase == "settled", handle.report()
            handle.remove()
        return model

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.01)
    assert plans["all"].moved_bytes == 0
    assert plans["least"].moved_bytes > 0 or device_under_test.name == "cuda"
    assert plans["least"].recompute_s == plans["all"].recompute_s == 0


@of_devices
def test_chosen_modules_keep_to_the_memory(device_under_test: Device):
    plans: dict[str, Any] = {}

    def program(run: Run) -> nn.Module:
        model = run.module(make_model)
        torch.manual_seed(3)
        handle: Any = None
        if not run.stock:
            options = options_of(device_under_test)
            handle = torchoffload.offload_modules(model, "net.blocks.*", keep_last=1, memory=ALL, **options)
            assert isinstance(handle, torchoffload.Fitted)

        def call(x: torch.Tensor, step: int) -> torch.Tensor:
            if handle is not None and "all" not in plans and handle.phase == "settled":
                plans["all"] = handle.plan
                handle.replan(memory_for_least(handle, device_under_test))
            return model(x)

        train(run, model, call)
        if handle is not None:
            assert handle.phase == "settled", handle.report()
            plans["least"] = handle.plan
            assert "3 blocks" in handle.report()
            assert "net.blocks.3" not in handle.report()
            handle.remove()
        return model

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.01)
    assert plans["all"].moved_bytes == 0
    assert plans["least"].moved_bytes > 0 or device_under_test.name == "cuda"
    assert plans["least"].recompute_s == 0


def disk_context(model: nn.Module, memory: Any = ALL, **more: Any) -> torchoffload.OffloadActivations:
    return torchoffload.OffloadActivations(model=model, memory=memory, tier="disk", min_offload_size=0, **more)


def steps(model: nn.Module, context: Any, count: int) -> None:
    for _ in range(count):
        with context:
            loss = model(torch.randn(4, 8, WIDTH))
        loss.backward()


def test_a_memory_that_does_not_do_is_an_error_with_the_least_that_would():
    model = make_model()
    context = disk_context(model, memory=1 << 10)
    with pytest.raises(RuntimeError, match="needs at least"):
        steps(model, context, STEPS)
    assert context.fitted is not None
    assert context.fitted.phase == "least memory"
    steps(model, context, 2)  # raised once
    context.fitted.remove()


def test_what_comes_behind_remove_is_planned_anew():
    model = make_model()
    context = disk_context(model)
    steps(model, context, 2)
    first = context.fitted
    assert first is not None
    first.remove()
    steps(model, context, 2)
    assert context.fitted is not first
    assert context.fitted is not None
    context.fitted.remove()


def test_other_options_make_another_plan():
    model = make_model()
    first, second = disk_context(model), disk_context(model, on_full="error")
    steps(model, first, 1)
    steps(model, second, 1)
    assert first.fitted is not None
    assert second.fitted is not None
    assert first.fitted.phase == "removed"
    second.fitted.remove()


def test_a_model_that_fit_was_called_for_is_refused():
    model = make_model()
    with (
        torchoffload.fit(model, ALL, tier="disk"),
        pytest.raises(ValueError, match="model is fitted already"),
        disk_context(model),
    ):
        pass


def test_a_model_that_is_gone_is_an_error():
    model = make_model()
    context = disk_context(model)
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="does not exist any more"), context:
        pass


def test_where_torchoffload_is_disabled_nothing_is_planned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    model = make_model()
    context = disk_context(model)
    steps(model, context, 1)
    assert context.fitted is None


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"memory": "1GiB", "tier": "disk"}, TypeError, "memory= needs model="),
        ({"memory": "1 potato", "model": nn.Linear(1, 1)}, ValueError, "memory must be"),
        ({"memory": True, "model": nn.Linear(1, 1)}, TypeError, "memory must be"),
        ({"memory": 2.0, "model": nn.Linear(1, 1)}, ValueError, "memory must be"),
        (
            {"memory": "1GiB", "model": nn.Linear(1, 1), "reload_window_bytes": 0},
            TypeError,
            "leave reload_window_bytes",
        ),
        ({"memory": "1GiB", "model": nn.Linear(1, 1), "max_fwd_stash_size": 5}, TypeError, "leave max_fwd_stash_size"),
    ],
)
def test_wrong_options_of_a_context(given: dict[str, Any], error: type[Exception], told: str):
    with pytest.raises(error, match=told):
        torchoffload.OffloadActivations(**given)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"fraction": 0.5}, TypeError, "leave fraction out"),
        ({"only_inputs": True}, TypeError, "leave only_inputs out"),
        ({"offload_window_bytes": 1}, TypeError, "leave offload_window_bytes out"),
        ({"memory": "1 potato"}, ValueError, "memory must be"),
    ],
)
def test_wrong_options_of_chosen_modules(given: dict[str, Any], error: type[Exception], told: str):
    with pytest.raises(error, match=told):
        torchoffload.offload_modules(make_model(), "net.blocks.*", **({"memory": "1GiB", "tier": "disk"} | given))


def test_copies_have_the_memory_and_pickles_are_refused():
    model = make_model()
    context = disk_context(model, memory="2GiB")
    assert "memory='2GiB'" in repr(context)
    assert "memory='2GiB'" in repr(copy.copy(context))
    copies = copy.deepcopy([model, context])
    steps(copies[0], copies[1], 1)
    assert copies[1].fitted is not None
    assert context.fitted is None
    copies[1].fitted.remove()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(context)


def test_the_function_with_the_head_takes_a_memory():
    model = make_model()
    context = torchoffload.get_act_offloading_ctx_manager(model, memory=ALL, tier="disk")
    steps(model, context, 1)
    assert isinstance(context, torchoffload.OffloadActivations)
    assert context.fitted is not None
    assert context.remove_head_hooks() == 0
    context.fitted.remove()
