"""Gradients are the same for every order in which forwards and backwards come."""

from collections import deque

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients
from models import TinyGpt, mlp, tokens_and_labels, update


@pytest.mark.parametrize("one_context", [True, False], ids=["one-context", "a-context-each-step"])
def test_several_steps_end_in_the_same_weights(device_under_test: Device, one_context: bool):
    def program(run: Run):
        model, context = run.module(TinyGpt), run.offload()
        for _ in range(4):
            with context if one_context else run.offload():
                loss = model(*tokens_and_labels(run))
            loss.backward()
            run.check(loss=loss, step=model)
            update(model)
        return model

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-in-first-out", "last-in-first-out"])
@pytest.mark.parametrize("entries", ["one", "two"])
def test_two_forwards_then_two_backwards(device_under_test: Device, order: tuple[int, int], entries: str):
    def program(run: Run):
        model, inputs = mlp(run), [run.leaf(16, 32), run.leaf(16, 32)]
        if entries == "one":
            with run.offload():
                losses = [model(x).square().sum() for x in inputs]
        else:
            losses = []
            for x in inputs:
                with run.offload():
                    losses.append(model(x).square().sum())
        for index in order:
            losses[index].backward()
            run.check(after=model)
        return [x.grad for x in inputs]

    assert_same_gradients(program, device=device_under_test)


def run_pipeline(run: Run, schedule: list[tuple[str, int, int]], *, one_entry: bool):
    """Runs (kind, stage, micro-batch) in order; each stage detaches its input, as stages on other ranks would."""
    stages = [mlp(run) for _ in range(1 + max(stage for _, stage, _ in schedule))]
    inputs, outputs = {}, {}
    context = run.offload()

    def forward(stage: int, batch: int):
        before = run.tensor(8, 32) if stage == 0 else outputs[stage - 1, batch].detach()
        inputs[stage, batch] = before.requires_grad_()
        if one_entry:
            outputs[stage, batch] = stages[stage](before)
        else:
            with run.offload():
                outputs[stage, batch] = stages[stage](before)

    def backward(stage: int, batch: int):
        output = outputs.pop((stage, batch))
        if (stage + 1, batch) in inputs:
            output.backward(inputs.pop((stage + 1, batch)).grad)
        else:
            output.square().sum().backward()
        run.check(**{f"input_gradient_{stage}_{batch}": inputs[stage, batch].grad})

    def run_all():
        for kind, stage, batch in schedule:
            forward(stage, batch) if kind == "F" else backward(stage, batch)

    if one_entry:
        with context:
            run_all()
    else:
        run_all()
    return stages


def gpipe(stage_count: int, batch_count: int) -> list[tuple[str, int, int]]:
    forwards = [("F", stage, batch) for batch in range(batch_count) for stage in range(stage_count)]
    backwards = [
        ("B", stage, batch) for batch in reversed(range(batch_count)) for stage in reversed(range(stage_count))
    ]
    return forwards + backwards


def one_forward_one_backward(stage_count: int, batch_count: int) -> list[tuple[str, int, int]]:
    schedule, alive = [], deque()
    for batch in range(batch_count):
        schedule += [("F", stage, batch) for stage in range(stage_count)]
        alive.append(batch)
        if len(alive) >= stage_count:
            oldest = alive.popleft()
            schedule += [("B", stage, oldest) for stage in reversed(range(stage_count))]
    return schedule + [("B", stage, batch) for batch in alive for stage in reversed(range(stage_count))]


def interleaved(stage_count: int, batch_count: int) -> list[tuple[str, int, int]]:
    """Virtual stages: a batch's backward starts while another's forward stands between two stages."""
    schedule = [("F", 0, batch) for batch in range(batch_count)]
    for stage in range(1, stage_count):
        schedule += [("F", stage, batch) for batch in range(batch_count)]
    middle = [("B", stage_count - 1, 0), ("B", stage_count - 1, 1)]
    for stage in reversed(range(stage_count - 1)):
        middle += [("B", stage, 1), ("B", stage, 0)]
    rest = [("B", stage, batch) for batch in range(2, batch_count) for stage in reversed(range(stage_count))]
    return schedule + middle + rest


SCHEDULES = {
    "gpipe": gpipe(2, 3),
    "1f1b": one_forward_one_backward(2, 4),
    "1f1b-three-stages": one_forward_one_backward(3, 5),
    "interleaved": interleaved(4, 3),
}


@pytest.mark.parametrize("one_entry", [True, False], ids=["one-entry", "an-entry-each-forward"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_of_a_pipeline(device_under_test: Device, schedule: str, one_entry: bool):
    assert_same_gradients(
        lambda run: run_pipeline(run, SCHEDULES[schedule], one_entry=one_entry), device=device_under_test
    )


def test_gradients_accumulate_over_micro_batches(device_under_test: Device):
    def program(run: Run):
        model = run.module(TinyGpt)
        for _ in range(3):
            with run.offload():
                loss = model(*tokens_and_labels(run)) / 3
            loss.backward()
        return model

    assert_same_gradients(program, device=device_under_test)


def test_retain_graph_lets_backward_run_three_times(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            loss = model(x).square().sum()
        for retain_graph in (True, True, False):
            loss.backward(retain_graph=retain_graph)
            run.check(weights=model, x=x.grad)
        with run.raising("freed"):
            loss.backward()

    assert_same_gradients(program, device=device_under_test)


def test_a_retained_graph_survives_other_steps_in_between(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            kept_loss = model(x).square().sum()
        kept_loss.backward(retain_graph=True)
        for _ in range(3):
            with run.offload():
                loss = model(run.tensor(16, 32)).sum()
            loss.backward()
        kept_loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("where", ["inside", "after"])
def test_double_backward_through_create_graph(device_under_test: Device, where: str):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)

        def penalty():
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            run.check(gradient=gradient)
            return gradient.square().sum() + loss

        with run.offload():
            loss = model(x).square().sum()
            if where == "inside":
                second = penalty()
        if where == "after":
            second = penalty()
        second.backward()
        return model, x.grad

    # Inside, most of what is packed is packed by the graph task, and stays.
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1 if where == "inside" else 0.9)


def test_third_derivatives(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = (x.sin() * x.exp()).sum()
        for _ in range(3):
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            run.check(derivative=first)
            y = first.sum()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.3)


def test_what_a_graph_task_packs_stays(device_under_test: Device):
    """With the context open, create_graph packs inside backward: those are kept."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x.sin().exp().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        return first, second

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1, kept_reason="in_backward")


def test_a_branch_that_backward_does_not_take(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            used = model(x).square().sum()
            unused = model(x * 2).exp().sum()
        used.backward()
        run.check(used=model, x=x.grad)
        del unused

    assert_same_gradients(program, device=device_under_test)


def test_autograd_grad_on_a_part_then_on_the_rest(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            middle = model(x)
            loss = (model(middle) * x).sum()
        run.check(part=torch.autograd.grad(loss, middle, retain_graph=True))
        run.check(weights=torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        loss.backward(inputs=[x])
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_two_losses_share_a_trunk(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            trunk = model(x)
            left, right = trunk.sin().sum(), trunk.exp().sum()
        right.backward(retain_graph=True)
        run.check(right=model)
        left.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_recurrent_graph_grows_over_several_entries(device_under_test: Device):
    """One graph over five entries: its records lie on five tapes."""

    def program(run: Run):
        model, state = mlp(run), run.leaf(16, 32)
        first = state
        for _ in range(5):
            with run.offload():
                state = model(state) * state
        state.sum().backward()
        return model, first.grad

    assert_same_gradients(program, device=device_under_test)
