"""torchoffload.estimate: it counts what a step saves, changes nothing, says what to use, and has clear errors."""

import copy
import gc
import importlib
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import torchoffload
from torchoffload._estimate.dry_step import Setting, dry_step

WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers, a count of the calls, and a loss if a target is given."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 10)
        self.call_count = 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> object:
        self.call_count += 1
        self.seen += 1
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        return y if target is None else {"loss": F.cross_entropy(y.flatten(0, 1), target.flatten()), "logits": y}


def inputs(batch: int = 8, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, length, WIDTH), torch.randint(10, (batch, length))


def real_saved_bytes(model: nn.Module, *args: object) -> int:
    own = {each.untyped_storage()._cdata for each in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held.append(storage)
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*args)
    return sum(found.values())


def test_saved_bytes_are_those_of_a_real_step():
    model, args = Net(), inputs()
    assert torchoffload.estimate(model, *args).saved_bytes == real_saved_bytes(model, *args)


def test_weights_gradients_and_optimizer_are_counted():
    model = Net()
    model.layers[0].requires_grad_(False)
    weights = sum(each.nbytes for each in model.parameters())
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    found = torchoffload.estimate(model, *inputs(), optimizer="adamw")
    # The allocator of CUDA rounds each tensor up to 512 bytes.
    assert weights <= found.weights_bytes <= weights + 512 * (len(list(model.parameters())) + 1)
    assert found.gradients_bytes == trained
    assert found.optimizer_bytes == 2 * trained
    assert torchoffload.estimate(model, *inputs(), optimizer=12).optimizer_bytes == 12 * trained // 4


def test_the_peak_has_the_step_of_the_optimizer():
    model = Net()
    small = torch.randn(1, 1, WIDTH)
    found = torchoffload.estimate(model, small, optimizer="adamw")
    trained = sum(each.nbytes for each in model.parameters())
    assert found.plain.peak_bytes >= found.weights_bytes + 4 * trained  # gradients, two states, and the scratch memory


def test_checkpoints_and_fit_need_less_memory_and_more_time():
    found = torchoffload.estimate(Net(12), *inputs(64, 256), gpu="H200", blocks=[Layer], optimizer="none")
    assert found.fit_least.peak_bytes <= found.checkpointed.peak_bytes < found.plain.peak_bytes / 2
    assert found.plain.step_ms < found.checkpointed.step_ms
    assert len(found.blocks) == 12


def test_the_model_stays_as_it_is():
    model, (x, target) = Net(), inputs()
    model(x, target)["loss"].backward()
    handle = model.register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    gradients = [each.grad.clone() for each in model.parameters()]
    count, hooks, versions = model.call_count, len(model._forward_hooks), [each._version for each in model.parameters()]
    states = torch.get_rng_state(), random.getstate()
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    torchoffload.estimate(model, x, target)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(each.grad, was) for each, was in zip(model.parameters(), gradients, strict=True))
    assert (model.call_count, len(model._forward_hooks)) == (count, hooks)
    assert [each._version for each in model.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == modes
    assert F.scaled_dot_product_attention.__module__ != "torchoffload._estimate.kernels"
    handle.remove()


def test_no_tensor_of_the_dry_run_is_left():
    from torch._subclasses.fake_tensor import FakeTensor

    def count() -> int:
        gc.collect()
        return sum(type(each) is FakeTensor for each in gc.get_objects())

    before = count()
    torchoffload.estimate(Net(), *inputs())
    assert count() == before


def test_a_model_on_the_meta_device_gives_the_same_numbers():
    args = inputs()
    with torch.device("meta"):
        model = Net()
    real, meta = (torchoffload.estimate(each, *values) for each, values in (
        (Net(), args), (model, tuple(each.to("meta") for each in args)),
    ))  # fmt: skip
    assert (real.saved_bytes, real.plain, real.checkpointed) == (meta.saved_bytes, meta.plain, meta.checkpointed)


def test_dtype_and_autocast():
    model, args = Net(), inputs()
    full = torchoffload.estimate(model, *args)
    half = torchoffload.estimate(model, *args, dtype="bfloat16")
    mixed = torchoffload.estimate(model, *args, autocast=torch.bfloat16)
    assert half.weights_bytes < 0.6 * full.weights_bytes
    assert mixed.weights_bytes == full.weights_bytes
    assert half.saved_bytes < 0.7 * full.saved_bytes
    assert mixed.saved_bytes != full.saved_bytes


def test_under_autocast_layer_norm_saves_float32_as_on_cuda():
    trace = dry_step(nn.LayerNorm(WIDTH), (torch.randn(4, WIDTH),), {}, Setting(autocast=torch.bfloat16))
    assert {each.cost.dtype for each in trace.operators if "layer_norm" in str(each.operator)} == {torch.float32}


def test_a_loss_function_may_be_given():
    model, (x, target) = Net(), inputs()
    own = torchoffload.estimate(model, x, target)
    given = torchoffload.estimate(model, x, loss=lambda y: F.cross_entropy(y.flatten(0, 1), target.flatten()))
    assert given.saved_bytes == own.saved_bytes
    assert own.notes == given.notes == ()
    assert "no loss" in torchoffload.estimate(model, x).notes[0]


def test_dropout_saves_a_mask_of_one_byte_as_on_a_gpu():
    x = torch.randn(32, WIDTH, requires_grad=True)
    assert torchoffload.estimate(nn.Sequential(nn.Dropout(0.1)), x).saved_bytes == x.numel()


def test_attention_saves_no_matrix_of_weights_as_on_a_gpu():
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(1, 2, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
    assert torchoffload.estimate(Attention(), x).saved_bytes < 3 * x.nbytes


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.tanh_())


@pytest.mark.parametrize("block", [SelfAttention, InPlace])
def test_blocks_that_ask_whether_arguments_are_the_same_or_write_to_them(block: type[nn.Module]):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(4)))
    found = torchoffload.estimate(model, inputs()[0], blocks=[block], optimizer="none")
    assert found.fit_least.peak_bytes <= found.checkpointed.peak_bytes <= found.plain.peak_bytes


def test_moved_inputs_are_not_on_the_device_at_the_loss():
    from torchoffload._estimate.dry_step import Blocks

    model, (x, _) = Net(), inputs()
    names = [f"layers.{number}" for number in range(4)]
    kept, moved = (
        dry_step(model, (x,), {}, Setting(), blocks=names, do=each) for each in (Blocks.CHECKPOINTED, Blocks.MOVED)
    )
    # All but the input of the model, which the loop holds.
    assert kept.loss_bytes - moved.loss_bytes == 3 * x.nbytes


# ---- Which way


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "plain"),
        ({"memory": "4MiB"}, "none"),
        ({"memory": 60 << 20, "link": 1e6}, "move"),
        ({"memory": 26 << 20, "link": 0.001}, "checkpoint"),
    ],
    ids=["it fits", "not even the weights fit", "a link of no time", "a link of no use"],
)
def test_the_way_that_is_advised(options: dict, way: str):
    card = torchoffload.Card(
        name="own", half_tflops=100, single_tflops=50, tf32_tflops=50, memory_gib=24, bandwidth_gb_per_s=1000,
        link_gb_per_s=options.pop("link", 25),
    )  # fmt: skip
    model = Net(8)
    found = torchoffload.estimate(model, *inputs(16, 256), gpu=card, blocks=[Layer], optimizer="sgd", **options)
    assert found.way == way, str(found)
    assert found.why in str(found)


def test_fit_is_advised_if_it_beats_both():
    card = torchoffload.Card(
        name="own", half_tflops=100, single_tflops=50, tf32_tflops=50, memory_gib=24, bandwidth_gb_per_s=1000,
        link_gb_per_s=25,
    )  # fmt: skip
    found = torchoffload.estimate(
        Net(8), *inputs(256, 512), gpu=card, blocks=[Layer], optimizer="sgd", memory="1.5GiB", host_memory="8GiB"
    )
    assert found.way == "fit", str(found)
    assert found.plain.peak_bytes > found.memory_bytes >= found.fit.peak_bytes
    assert found.plain.step_ms <= found.fit.step_ms <= min(found.checkpointed.step_ms, found.moved.step_ms)


def test_no_more_moves_than_host_memory_has_room_for():
    options = {"gpu": "RTX 4090", "blocks": [Layer], "optimizer": "sgd", "memory": "1.5GiB"}
    found = torchoffload.estimate(Net(8), *inputs(256, 512), host_memory="64MiB", **options)
    assert found.fit.host_bytes <= 64 << 20


def test_the_table_names_all_that_it_tells():
    text = str(torchoffload.estimate(Net(), *inputs(), gpu="RTX 4090"))
    for each in ("RTX 4090", "rough", "weights", "saved by autograd", "checkpointed", "fit, in the least", "use: "):
        assert each in text
    assert "rough" not in str(torchoffload.estimate(Net(), *inputs(), gpu="H200"))


def test_a_card_without_bfloat16_is_noted():
    found = torchoffload.estimate(Net(), *inputs(), gpu="T4", dtype="bfloat16")
    assert any("no bfloat16" in note for note in found.notes)


def test_recurrent_layers_are_noted():
    found = torchoffload.estimate(nn.LSTM(8, 8), torch.randn(4, 2, 8), loss=lambda output: output[0].sum())
    assert any("recurrent" in note for note in found.notes)


# ---- Wrong calls


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gpu": "RTX 4900"}, ValueError, "did you mean 'RTX 4090'"),
        ({"gpu": 4090}, TypeError, "the name of a card"),
        ({"optimizer": "adamww"}, ValueError, "Did you mean 'adamw'"),
        ({"optimizer": -1}, ValueError, "at least 0"),
        ({"optimiser": "sgd"}, TypeError, "did you mean optimizer"),
        ({"dtype": "bfloat"}, ValueError, "Did you mean 'bfloat16'"),
        ({"autocast": torch.int8}, ValueError, "no floating-point dtype"),
        ({"loss": 3}, TypeError, "loss must be a function"),
        ({"memory": "lots"}, ValueError, "memory must be"),
        ({"memory": 24}, ValueError, 'did you mean "24GiB"'),
        ({"host_memory": 0.5}, ValueError, "host_memory must be an amount"),
        ({"keep_gradients": 1}, TypeError, "True or False"),
        ({"labels": 1}, TypeError, "not what Net.forward takes"),
    ],
    ids=lambda each: str(each) if isinstance(each, str) else None,
)
def test_wrong_arguments_are_errors_that_name_what_is_right(options: dict, error: type, text: str):
    with pytest.raises(error, match=text):
        torchoffload.estimate(Net(), inputs()[0], **options)


def test_a_model_is_asked_for():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        torchoffload.estimate("gpt2")


def test_a_loss_of_several_elements_is_an_error():
    with pytest.raises(RuntimeError, match="one element"):
        torchoffload.estimate(Net(), inputs()[0], loss=lambda y: y)


def test_a_frozen_model_is_an_error():
    with pytest.raises(RuntimeError, match="needs a gradient"):
        torchoffload.estimate(Net().requires_grad_(False), inputs()[0])


class OnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[torch.from_numpy(x.detach().numpy()) > 0])


def test_a_model_that_needs_data_says_why_and_what_to_do():
    with pytest.raises(RuntimeError, match=r"cannot run without data: .*\nWhat to do: "):
        torchoffload.estimate(OnData(), torch.randn(4, WIDTH))


# ---- The name


def test_the_name_is_a_function_also_after_its_command_was_imported():
    importlib.import_module("torchoffload.estimate")
    assert torchoffload.estimate(nn.Linear(2, 2), torch.ones(1, 2)).weights_bytes > 0


def test_the_import_of_torchoffload_does_not_import_it():
    program = "import sys, torchoffload; assert not any('_estimate' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
