"""torchao's tensors: quantized weights stay, and of FP8 and NF4 tensors that backward needs the inner ones move."""

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao", minversion="0.18", reason="no torchao 0.18 (requirements-dev.txt has it)")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
    from torchao.prototype.quantized_training import (
        Int8MixedPrecisionTrainingConfig,
        int8_mixed_precision_training,
        int8_weight_only_quantized_training,
    )
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_, to_nf4

WIDTH = 128  # NF4 wants 64 x 256 elements for a block of its scales
ROWS = 32
ACTIVATION_BYTES = ROWS * WIDTH * 4


def inner_tensors(wrapper: torch.Tensor) -> list[torch.Tensor]:
    names, _ = wrapper.__tensor_flatten__()
    return [getattr(wrapper, name) for name in names]


def inner_bytes(wrapper: torch.Tensor) -> int:
    """Of the storages: an inner tensor takes its whole storage along, so that its offset stays what it is."""
    storages = [inner.untyped_storage() for inner in inner_tensors(wrapper)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def trained(model: nn.Module) -> list[torch.Tensor]:
    return [
        value for parameter in model.parameters() if parameter.requires_grad for value in (parameter, parameter.grad)
    ]


def train(run: Run, model: nn.Module, x: torch.Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        with run.offload():
            loss = model(x).square().sum()
        loss.backward()
        run.check(loss=loss, gradient=x.grad)


# ---- NF4 ----


class QloraLinear(nn.Module):
    """A frozen NF4 weight with a low-rank update that is trained."""

    RANK = 8

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.rand(WIDTH, WIDTH) - 0.5), requires_grad=False)
        self.a = nn.Parameter(torch.rand(WIDTH, self.RANK) - 0.5)
        self.b = nn.Parameter(torch.rand(self.RANK, WIDTH) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + (x @ self.a) @ self.b


def test_qlora_keeps_its_nf4_weights_and_moves_what_its_adapters_need(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(QloraLinear(), nn.Tanh(), QloraLinear()))
        x = run.leaf(ROWS, WIDTH)
        train(run, model, x)
        return trained(model)

    low_rank_bytes = ROWS * QloraLinear.RANK * 4
    # In each step: x, tanh's result and what is squared; both products with `a`.
    assert_same_gradients(
        program,
        device=device_under_test,
        moved_bytes=2 * (3 * ACTIVATION_BYTES + 2 * low_rank_bytes),
        kept_reason="parameter",
    )


def test_an_nf4_tensor_that_is_no_parameter_moves_its_inner_tensors(device_under_test: Device):
    bytes_expected = inner_bytes(to_nf4(torch.rand(WIDTH, WIDTH)))

    def program(run: Run):
        x = run.leaf(WIDTH, WIDTH)

        def look(unpacked: torch.Tensor) -> torch.Tensor:
            run.check(kind=type(unpacked).__name__, inner=inner_tensors(unpacked), requires_grad=unpacked.requires_grad)
            return unpacked.to(torch.float32)

        with run.offload():
            y = Save.apply(x, look, to_nf4(x.detach().sin()))
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=bytes_expected)


def test_a_detached_nf4_weight_stays_as_the_parameter_it_is(device_under_test: Device):
    def program(run: Run):
        weight = nn.Parameter(to_nf4(run.tensor(WIDTH, WIDTH)), requires_grad=False)
        x = run.leaf(WIDTH, WIDTH)
        with run.offload():
            y = Save.apply(x, lambda *_: None, weight)
            y = Save.apply(y, lambda unpacked: unpacked.to(torch.float32), weight.detach())
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="parameter")


# ---- FP8 ----


def float8_config(device: Device, recipe: str) -> Float8LinearConfig:
    """On a CPU the product of two FP8 matrices is computed in float32."""
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device.name != "cuda")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_training(device_under_test: Device, recipe: str):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
        model = convert_to_float8_training(model.bfloat16(), config=float8_config(device_under_test, recipe))
        x = run.leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        train(run, model, x)
        return trained(model)

    # In each step: x, tanh's result, what is squared; in bfloat16.
    assert_same_gradients(
        program, device=device_under_test, moved_bytes=2 * 3 * ACTIVATION_BYTES // 2, kept_reason="parameter"
    )


def test_an_input_that_was_cast_to_fp8_before_is_saved_as_fp8_and_moves(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        (layer,) = convert_to_float8_training(model.bfloat16(), config=float8_config(device_under_test, "tensorwise"))
        x = run.leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        with run.offload():
            cast = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, layer.linear_mm_config)
            y = layer(cast)
        y.sum().backward()
        return x.grad, trained(layer)

    # An element a byte, and the scale.
    assert_same_gradients(program, device=device_under_test, moved_bytes=ROWS * WIDTH + 4, kept_reason="parameter")


def test_an_fp8_tensor_comes_back_as_it_was(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        cast = hp_tensor_to_float8_dynamic(run.tensor(WIDTH, ROWS).bfloat16(), torch.float8_e5m2, None)

        def look(*unpacked: Float8TrainingTensor) -> torch.Tensor:
            for each in unpacked:
                run.check(kind=type(each).__name__, data=each._data, scale=each._scale, stride=each.stride())
            return unpacked[0].to_original_precision()

        with run.offload():
            y = Save.apply(x, look, cast.t(), cast)
        y.sum().backward()
        return x.grad

    # Both share their data.
    assert_same_gradients(program, device=device_under_test, moved_bytes=ROWS * WIDTH + 4)


@pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded")
def test_an_fp8_tensor_inside_a_dtensor(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        cast = hp_tensor_to_float8_dynamic(run.tensor(ROWS, WIDTH).bfloat16(), torch.float8_e4m3fn, None)
        mesh = init_device_mesh("cpu", (1,))
        sharded = DTensor.from_local(cast, mesh, [Replicate()], run_check=False)

        def look(unpacked: DTensor) -> torch.Tensor:
            local = unpacked._local_tensor
            run.check(kinds=[type(unpacked).__name__, type(local).__name__], inner=inner_tensors(local))
            return local.to_original_precision()

        with run.offload():
            y = Save.apply(x, look, sharded)
        y.sum().backward()
        return x.grad

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert_same_gradients(program, device=device_under_test, moved_bytes=ROWS * WIDTH + 4)
    finally:
        dist.destroy_process_group()


# ---- int8 and int4 weights ----


FROZEN = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", FROZEN.values(), ids=FROZEN)
def test_inputs_of_a_frozen_quantized_linear_move_and_its_weight_does_not(device_under_test: Device, config):
    def program(run: Run):
        model = run.module(lambda: nn.Linear(WIDTH, WIDTH, bias=False)).requires_grad_(False)
        quantize_(model, config)
        x = run.leaf(ROWS, WIDTH)
        with run.offload(model=model):
            y = Save.apply(x.exp(), lambda *_: None, model.weight)
            y = model(y).sin()
        y.sum().backward()
        return x.grad

    # What exp and sin save; backward's weight is dequantized in forward, and is a tensor as any other.
    assert_same_gradients(
        program,
        device=device_under_test,
        moved_bytes=2 * ACTIVATION_BYTES + WIDTH * WIDTH * 4,
        kept_reason="parameter",
    )


TRAINED = {
    "int8-weight": lambda model: quantize_(model, int8_weight_only_quantized_training()),
    "int8-products": lambda model: quantize_(model, int8_mixed_precision_training()),
    "int8-modules": lambda model: quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("convert", TRAINED.values(), ids=TRAINED)
def test_int8_training_keeps_its_weights_and_moves_its_inputs(
    device_under_test: Device, convert: Callable[[nn.Module], None]
):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
        convert(model)
        x = run.leaf(ROWS, WIDTH)
        for _ in range(2):
            with run.offload(model=model):
                loss = model(x).square().sum()
            loss.backward()
            run.check(loss=loss, gradient=x.grad)
        return [parameter.grad for parameter in model.parameters()]

    # In each step: x, tanh's result, what is squared.
    assert_same_gradients(
        program, device=device_under_test, moved_bytes=2 * 3 * ACTIVATION_BYTES, kept_reason="parameter"
    )


# ---- low-bit optimizers ----


@pytest.mark.parametrize("optimizer", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_training_with_a_low_bit_optimizer(device_under_test: Device, optimizer: type[torch.optim.Optimizer]):
    """Its states are wrappers that no graph saves. The step that it compiles runs eagerly here: it is none of ours."""

    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
        steps, x = optimizer(model.parameters(), lr=1e-2), run.leaf(ROWS, WIDTH)
        with torch.compiler.set_stance("force_eager"):
            for _ in range(3):
                with run.offload():
                    loss = model(x).square().sum()
                loss.backward()
                steps.step()
                steps.zero_grad()
                run.check(loss=loss)
        return list(model.parameters())

    assert_same_gradients(
        program, device=device_under_test, moved_bytes=3 * 3 * ACTIVATION_BYTES, kept_reason="parameter"
    )
