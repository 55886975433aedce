"""offload_modules: only what is saved inside the chosen modules moves, and gradients are the same."""

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from module_models import (
    DEPTH,
    INPUT_BYTES,
    TOKENS,
    WIDTH,
    Attention,
    Layer,
    Mlp,
    Stack,
    assert_moves,
    offload,
    options,
    training,
)


def of_model(choose):
    """Marks a function that picks modules out of the run's own model."""

    def of_model(model):
        return choose(model)

    return of_model


ATTENTION_BYTES = DEPTH * Attention.SAVED_BYTES


@pytest.mark.parametrize(
    ("modules", "nbytes"),
    [
        pytest.param("layers.1.attention", Attention.SAVED_BYTES, id="a name"),
        pytest.param("layers.*.attention", ATTENTION_BYTES, id="a glob"),
        pytest.param("**.attention", ATTENTION_BYTES, id="a glob at any depth"),
        pytest.param("layers", Stack.SAVED_BYTES, id="a list of modules"),
        pytest.param(Attention, ATTENTION_BYTES, id="a type"),
        pytest.param(lambda name, module: name.endswith("mlp"), DEPTH * Mlp.SAVED_BYTES, id="a predicate"),
        pytest.param(of_model(lambda model: model.layers[2]), Layer.SAVED_BYTES, id="a module"),
        pytest.param(of_model(lambda model: list(model.layers[:2])), 2 * Layer.SAVED_BYTES, id="modules"),
        pytest.param(["layers.0.attention", Mlp], Attention.SAVED_BYTES + DEPTH * Mlp.SAVED_BYTES, id="some of each"),
        pytest.param(["layers.*", "layers.0"], Stack.SAVED_BYTES, id="one by two patterns"),
    ],
)
def test_only_what_is_saved_inside_moves(device_under_test: Device, modules, nbytes):
    assert_moves(device_under_test, modules, nbytes)


def test_the_whole_model_may_be_chosen_and_its_head_is_exempt(device_under_test: Device):
    # Outside of the layers: the input, its sine, and what is squared behind the head.
    assert_moves(device_under_test, of_model(lambda model: [model]), Stack.SAVED_BYTES + 3 * INPUT_BYTES)


def test_a_head_that_is_chosen_moves(device_under_test: Device):
    assert_moves(device_under_test, "lm_head", INPUT_BYTES)


def test_a_tied_head_is_exempt(device_under_test: Device):
    class Tied:
        def __init__(self, weight):
            self.weight = weight
            self.linear = TiedLinear()

        def __call__(self, x):
            return self.linear(x, self.weight)

    class TiedLinear(nn.Module):
        def forward(self, x, weight):
            return nn.functional.linear(x, weight)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()
            self.output = Tied(self.layer.mlp.up.weight)

        def forward(self, x):
            return self.output(self.layer(x)).sum()

    assert_moves(device_under_test, of_model(lambda model: model), Layer.SAVED_BYTES, make=Model)


def test_each_call_of_the_model_is_a_tape(device_under_test: Device):
    stats = assert_moves(device_under_test, "layers.*", Stack.SAVED_BYTES, steps=3)
    assert len(stats.tapes) == 3
    assert {tape.bytes_offloaded for tape in stats.tapes} == {Stack.SAVED_BYTES}


def test_two_calls_before_backward_are_two_tapes(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*")
        first, second = model(x), model(x * 2)
        first.backward()
        second.backward()
        return model, x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * Stack.SAVED_BYTES)
    assert len(stats.tapes) == 2


def test_two_models_are_two_tapes(device_under_test: Device):
    def program(run: Run):
        models = [run.module(Stack), run.module(lambda: Stack(depth=1))]
        x = run.leaf(TOKENS, WIDTH)
        for model in models:
            offload(run, device_under_test, model, "layers.*")
        sum(model(x) for model in models).backward()
        return models, x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=Stack.SAVED_BYTES + Layer.SAVED_BYTES)
    assert len(stats.tapes) == 2


def test_a_model_inside_a_model_has_a_tape_of_its_own(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.0")
        offload(run, device_under_test, model.layers[0], "attention")
        offload(run, device_under_test, model, "layers.1.mlp")
        model(x).backward()
        return model, x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=Layer.SAVED_BYTES + Mlp.SAVED_BYTES)
    assert len(stats.tapes) == 3


def test_a_chosen_module_called_outside_of_the_model_is_a_tape(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*")
        model.layers[1](model.layers[0](x)).sum().backward()
        return model, x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * Layer.SAVED_BYTES)
    assert len(stats.tapes) == 2


def test_a_module_inside_a_chosen_one_counts_for_itself(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(lambda: Stack(depth=1)), run.leaf(TOKENS, WIDTH)
        handle = offload(run, device_under_test, model, ["layers.*", "layers.*.attention"])
        model(x).backward()
        if handle is not None:
            rows = {row.name: row.bytes_offloaded for row in handle.stats()}
            # The layer's own: the mlp's three, one of which is what the layer hands on inside.
            assert rows == {"layers.0": Mlp.SAVED_BYTES, "layers.0.attention": Attention.SAVED_BYTES}
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=Layer.SAVED_BYTES)


class CallsItself(nn.Module):
    """Calls itself twice; the inner calls save what the outer one does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, depth=1):
        y = self.weight(x).exp()
        return self(y * 0.1, depth - 1) + self(y * 0.2, depth - 1) if depth else y.sum()


@pytest.mark.parametrize("modules", ["weight", of_model(lambda model: model)], ids=["inside", "the whole"])
def test_a_model_that_calls_itself_is_one_tape(device_under_test: Device, modules):
    calls = 3
    is_whole = modules != "weight"
    stats = assert_moves(
        device_under_test, modules, calls * (2 if is_whole else 1) * INPUT_BYTES, steps=1, make=CallsItself
    )
    assert len(stats.tapes) == 1


def test_a_context_around_gets_what_is_not_chosen(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        handle = offload(run, device_under_test, model, "layers.*.attention")
        with run.offload():
            loss = model(x)
        loss.backward()
        if handle is not None:
            assert sum(row.bytes_offloaded for row in handle.stats()) == ATTENTION_BYTES
        return model, x.grad

    stats = assert_same_gradients(program, device=device_under_test)
    assert len(stats.tapes) == 2
    assert stats.bytes_offloaded > Stack.SAVED_BYTES


def test_noop_manager_around_keeps_all(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        handle = offload(run, device_under_test, model, "layers.*")
        loss = model(x)
        with run.noop():
            loss = loss + model(x)
        loss.backward()
        if handle is not None:
            assert sum(row.bytes_saved - row.bytes_kept["parameter"] for row in handle.stats()) == Stack.SAVED_BYTES
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=Stack.SAVED_BYTES)


def test_no_gradients_no_tape(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*")
        for _ in range(2):
            with torch.no_grad():
                run.check(evaluated=model(x))
            with torch.inference_mode():
                model(x)
            loss = model(x)
            with torch.no_grad():
                model(x)
            loss.backward()
        return model, x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * Stack.SAVED_BYTES)
    assert len(stats.tapes) == 2


def test_a_part_without_gradients_is_left_alone(device_under_test: Device):
    class Frozen(Stack):
        def forward(self, x):
            with torch.no_grad():
                x = self.layers[0](x)
            return self.layers[1](x.requires_grad_()).sum()

    assert_moves(device_under_test, "layers.*", Layer.SAVED_BYTES, make=Frozen)


def test_an_evaluation_with_gradients_moves(device_under_test: Device):
    assert_moves(device_under_test, "layers.*", Stack.SAVED_BYTES, wrap=lambda model: model.eval())


def test_a_wrapper_around_the_model_changes_nothing(device_under_test: Device):
    class Wrapper(nn.Module):  # as DDP
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    assert_moves(device_under_test, "layers.*.attention", ATTENTION_BYTES, wrap=Wrapper)
    assert_moves(
        device_under_test, of_model(lambda model: model.module), Stack.SAVED_BYTES + 3 * INPUT_BYTES, wrap=Wrapper
    )


def test_keyword_arguments_and_any_output_pass(device_under_test: Device):
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, *, x, scale=1.0):
            return {"hidden": (self.layer(x * scale),)}

    def program(run: Run):
        model, x = run.module(Structured), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, ["layer", of_model(lambda each: each)(model)])
        model(x=x, scale=2.0)["hidden"][0].sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=Layer.SAVED_BYTES)


def test_options_are_those_of_a_context(device_under_test: Device):
    """With a minimum above what there is nothing moves."""
    program = training(device_under_test, "layers.*", min_offload_size=INPUT_BYTES + 1)
    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="small")


def test_learning_is_the_contexts_own(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*", learn=True, reload_window_bytes=INPUT_BYTES)
        for _ in range(4):
            model(x).backward()
        return model, x.grad

    stats = assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert set(stats.records_kept) - {"parameter"} <= {"tape_end", "small_copy", "lives_on", "needed_soon"}


def test_the_environment_turns_it_off(device_under_test: Device, monkeypatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    model = Stack()
    torchoffload.offload_modules(model, "layers.*", **options(device_under_test))
    torchoffload.reset_stats()
    model(torch.ones(TOKENS, WIDTH)).backward()
    assert torchoffload.stats().handles == 0
