"""fraction, keep_last and only_inputs; modules that are checkpointed; modules that are compiled."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from module_models import DEPTH, INPUT_BYTES, TOKENS, WIDTH, Attention, Layer, Stack, assert_moves, offload, training

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


# Fractions.


@pytest.mark.parametrize(
    ("fraction", "layers_bytes"),
    [(1, Stack.SAVED_BYTES), (0.5, Stack.SAVED_BYTES / 2), (1 / 18, INPUT_BYTES), (0.01, 0), (0.99, 17 * INPUT_BYTES)],
)
def test_a_fraction_of_the_bytes_moves_from_the_second_call_on(device_under_test: Device, fraction, layers_bytes):
    program = training(device_under_test, "layers.*", steps=3, fraction=fraction)
    moved_bytes = Stack.SAVED_BYTES + 2 * int(layers_bytes)
    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes)
    assert stats.bytes_kept.get("beyond_fraction", 0) == 2 * (Stack.SAVED_BYTES - int(layers_bytes))
    assert ("beyond_fraction" in stats.records_kept) == (fraction != 1)


def test_the_earliest_move(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        handle = offload(run, device_under_test, model, "layers.*", fraction=1 / DEPTH)
        model(x).backward()
        if handle is not None:
            torchoffload.reset_stats()
        model(x).backward()
        if handle is not None:
            assert [row.bytes_offloaded for row in handle.stats()] == [Layer.SAVED_BYTES, 0, 0]
            assert [row.bytes_kept.get("beyond_fraction", 0) for row in handle.stats()] == [0, *[Layer.SAVED_BYTES] * 2]
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=Layer.SAVED_BYTES)


def test_a_fraction_is_of_the_call_before(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*", fraction=0.5)
        for tokens in (TOKENS, TOKENS // 2, TOKENS):
            model(x[:tokens]).backward()
        return model, x.grad

    # All; then all, as half the tokens are half the bytes; then half of what half the tokens were.
    moved_bytes = Stack.SAVED_BYTES + Stack.SAVED_BYTES // 2 + 4 * INPUT_BYTES
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes, kept_reason="beyond_fraction")


def test_a_fraction_learns_along(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*", fraction=0.5, learn=True)
        for _ in range(6):
            model(x).backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05, kept_reason="beyond_fraction")


@pytest.mark.parametrize("keep_last", [None, 0, 1, 2])
def test_the_last_modules_are_left_alone(device_under_test: Device, keep_last):
    moved = (DEPTH - (keep_last or 0)) * Layer.SAVED_BYTES
    assert_moves(device_under_test, ["layers.*", "layers.*.mlp"], moved, keep_last=keep_last)


# Checkpoints and only_inputs.


class Checkpointed(Stack):
    """Each layer under torch's checkpoint; `called`: around its call or, in older transformers, around its __call__."""

    use_reentrant = False

    def forward(self, x):
        x = self.embed(x.sin()).tanh()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.lm_head(x).square().sum()


class CheckpointingLayer(Layer):
    """Checkpoints its own call, hooks and all, as layers of transformers did until version 5."""

    use_reentrant = False

    def __call__(self, *args, **kwargs):
        return checkpoint(super().__call__, *args, use_reentrant=self.use_reentrant, **kwargs)


class CheckpointingForward(Layer):
    """Checkpoints its own forward, as layers of transformers do."""

    use_reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def made(use_reentrant, kind):
    def make():
        model = {
            "around": Checkpointed,
            "call": lambda: Stack(layer=CheckpointingLayer),
            "forward": lambda: Stack(layer=CheckpointingForward),
            "wrapper": Stack,
        }[kind]()
        if kind == "wrapper":
            impl = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
            for index, layer in enumerate(model.layers):
                model.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=impl)
        for module in model.modules():
            if hasattr(module, "use_reentrant"):
                module.use_reentrant = use_reentrant
        return model

    return make


KINDS = pytest.mark.parametrize("kind", ["around", "call", "forward", "wrapper"])


@REENTRANT
@KINDS
def test_only_the_inputs_of_checkpointed_layers_move(device_under_test: Device, use_reentrant, kind):
    stats = assert_moves(
        device_under_test, "layers.*", DEPTH * INPUT_BYTES, make=made(use_reentrant, kind), only_inputs=True
    )
    assert stats.records_kept["not_an_input"] > 0
    assert len(stats.tapes) == 2


@REENTRANT
@KINDS
def test_checkpointed_layers_without_only_inputs(device_under_test: Device, use_reentrant, kind):
    """Where the checkpoint is inside of the layer's hooks its inputs move; what it computes again never does."""
    program = training(device_under_test, "layers.*", make=made(use_reentrant, kind))
    if kind in ("forward", "wrapper"):
        stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * DEPTH * INPUT_BYTES)
    else:
        torchoffload.reset_stats()
        with pytest.raises(AssertionError, match="nothing moved"):
            assert_same_gradients(program, device=device_under_test)
        stats = torchoffload.stats()
    assert "in_backward" not in stats.records_kept


def test_only_the_inputs_of_plain_layers_move(device_under_test: Device):
    """Of all that is saved in the whole call: q, the residual and the mlp save others."""
    stats = assert_moves(device_under_test, "layers.*", DEPTH * INPUT_BYTES, only_inputs=True)
    assert stats.bytes_kept["not_an_input"] >= 2 * (Stack.SAVED_BYTES - DEPTH * INPUT_BYTES)


def test_inputs_in_containers_and_keywords_move(device_under_test: Device):
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Parts()

        def forward(self, x):
            y, z = x * 2, x * 3
            return (self.layer([x * 1], parts={"y": (y,)}, z=z) * y.exp()).sum()

    class Parts(nn.Module):
        def forward(self, first, *, parts, z):
            return (first[0] * parts["y"][0] * z).sin()

    stats = assert_moves(device_under_test, "layer", 3 * INPUT_BYTES, make=Structured, only_inputs=True, steps=1)
    # The product of the first two, what sin is given and what it gives, and the exp twice. y is an input all along.
    assert stats.bytes_kept["not_an_input"] == 5 * INPUT_BYTES


def test_what_was_saved_before_it_became_an_input_moves_too(device_under_test: Device):
    """tanh saves its output, outside of any chosen module, before that is the input of one."""

    def program(run: Run):
        model, x = run.module(lambda: Stack(depth=1)), run.leaf(TOKENS, WIDTH)
        handle = offload(run, device_under_test, model, "layers.*", only_inputs=True)
        model(x).backward()
        if handle is not None:
            assert handle.stats()[0].records_offloaded == 1
        return model, x.grad

    stats = assert_same_gradients(
        program, device=device_under_test, moved_bytes=INPUT_BYTES, kept_reason="not_an_input"
    )
    assert stats.bytes_deduplicated == INPUT_BYTES  # the layer's own save


def test_a_leaf_that_becomes_an_input_moves(device_under_test: Device):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Attention()

        def forward(self, x):
            y = x.sin()
            return (self.layer(x) + y).sum()

    def program(run: Run):
        model, x = run.module(Direct), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layer", only_inputs=True)
        with run.raising("changed"):
            loss = model(x)
            with torch.no_grad():
                x.add_(1)
            loss.backward()
        model(x).backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * INPUT_BYTES, kept_reason="not_an_input")


def test_candidates_that_die_are_forgotten(device_under_test: Device):
    class Dropping(Stack):
        def forward(self, x):
            for _ in range(3):
                x.sin().exp()
            for layer in self.layers:
                layer(x)
                x = layer(x)
            return x.sum()

    # What the first call of each layer saved went with its graph: the second saves the input anew.
    assert_moves(device_under_test, "layers.*", 2 * DEPTH * INPUT_BYTES, make=Dropping, only_inputs=True, steps=1)


def test_only_inputs_with_a_fraction_and_the_last_kept(device_under_test: Device):
    program = training(
        device_under_test, "layers.*", make=made(False, "call"), only_inputs=True, fraction=0.5, keep_last=1, steps=2
    )
    assert_same_gradients(
        program,
        device=device_under_test,
        moved_bytes=3 * INPUT_BYTES,
        kept_reason=["beyond_fraction", "not_an_input"],
    )


def test_only_inputs_of_a_direct_call(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*", only_inputs=True)
        model.layers[0](x * 1).sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=INPUT_BYTES, kept_reason="not_an_input")


@REENTRANT
def test_a_model_that_is_checkpointed_itself(device_under_test: Device, use_reentrant):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*")
        with run.offload():
            loss = checkpoint(model, x, use_reentrant=use_reentrant)
        loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=INPUT_BYTES)


def test_a_chosen_module_inside_of_a_checkpoint_is_the_checkpoints(device_under_test: Device):
    class Half(Stack):
        def forward(self, x):
            x = checkpoint(self.layers[0], x, use_reentrant=False)
            return self.layers[1](x).sum()

    assert_moves(device_under_test, "layers.*", Layer.SAVED_BYTES, make=Half)


def test_a_transform_of_torch_func_refuses_hooks_and_runs(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.tensor(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*")
        inner = torch.func.grad(model)(x)
        run.check(jvp=torch.func.jvp(model, (x,), (x,)))
        loss = model(x + inner)
        loss.backward()
        return model, inner

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.2)


# Compiled modules.


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.devices("disk", "cuda")
def test_compiled_layers_move(device_under_test: Device, backend):
    torch._dynamo.reset()

    def make():
        model = Stack(depth=2)
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend=backend, fullgraph=True)
        return model

    program = training(device_under_test, "layers.*", make=make)
    assert_same_gradients(program, device=device_under_test, kept_reason="parameter")


@pytest.mark.devices("disk", "cuda")
def test_a_compiled_model_moves_as_a_whole_and_is_compiled_once(device_under_test: Device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def compiled(model):
        return torch.compile(model, backend=counter, fullgraph=True)

    def of_model(model):
        return model

    program = training(device_under_test, of_model, wrap=compiled, steps=3)
    assert_same_gradients(program, device=device_under_test)
    assert counter.frame_count == 1  # the stock runs compiled what the offloaded one runs


@pytest.mark.devices("disk", "cuda")
@pytest.mark.filterwarnings("ignore:torchoffload. 3 of 3 chosen modules")
def test_modules_inside_of_a_compiled_region_are_nothing_to_trace(device_under_test: Device):
    torch._dynamo.reset()

    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layers.*")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with run.offload():
            loss = compiled(x)
        loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


# Transformers.


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.devices("disk", "cuda")
def test_a_llama_of_transformers(device_under_test: Device, checkpointing):
    transformers = pytest.importorskip("transformers", reason="transformers is in requirements-dev.txt")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )

    def program(run: Run):
        model = run.module(lambda: transformers.LlamaForCausalLM(config)).train()
        if checkpointing != "none":
            arguments = {"use_reentrant": checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
            model.enable_input_require_grads()
        offload(run, device_under_test, model, "model.layers.*", only_inputs=True)
        tokens = torch.arange(2 * TOKENS, device=run.device).reshape(2, TOKENS)
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            run.check(loss=loss)
        with torch.no_grad():
            run.check(generated=model.eval().generate(tokens[:1, :4], max_new_tokens=4, do_sample=False))
        return model

    hidden_bytes = 2 * TOKENS * 32 * 4
    rotary_bytes = 2 * TOKENS * 8 * 4  # cos and sin are inputs, and saved where nothing is checkpointed
    moved_bytes = 2 * (3 * hidden_bytes + (rotary_bytes if checkpointing == "none" else 0))
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes, kept_reason="not_an_input")
