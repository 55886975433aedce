"""PEFT: adapters train, frozen weights never move, and the first blocks may need no gradient at all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients
from trainings import need, tiny_llama

need("transformers", "accelerate", "peft")

from peft import LoraConfig, get_peft_model  # noqa: E402
from peft.tuners.tuners_utils import BaseTuner  # noqa: E402

from hf_trainings import assert_same_training  # noqa: E402
from torchoffload.integrations._trainers import innermost_model  # noqa: E402

pytestmark = pytest.mark.devices("disk", "cuda")


def lora(run: Run, *, layers: list[int] | None = None, prepared: bool = False) -> Any:
    model = tiny_llama(run)
    if prepared:
        model.enable_input_require_grads()
    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(
        r=4, target_modules=targets, layers_to_transform=layers, lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def test_adapters_train_and_frozen_weights_stay(tmp_path: Path, device_under_test: Device):
    stats = assert_same_training(tmp_path, device_under_test, model=lora)
    assert stats.records_kept["parameter"] > 0


def test_the_first_blocks_need_no_gradient(tmp_path: Path, device_under_test: Device):
    late = assert_same_training(tmp_path, device_under_test, model=lambda run: lora(run, layers=[1]))
    both = assert_same_training(tmp_path, device_under_test, model=lora)
    assert 0 < late.bytes_offloaded < both.bytes_offloaded


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_adapters(tmp_path: Path, device_under_test: Device, reentrant: bool):
    assert_same_training(
        tmp_path,
        device_under_test,
        model=lambda run: lora(run, prepared=True),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )


def test_modules_are_named_as_in_the_model_inside(tmp_path: Path, device_under_test: Device):
    whole = assert_same_training(tmp_path, device_under_test, model=lora)
    layer = assert_same_training(tmp_path, device_under_test, model=lora, modules=["model.layers.1"])
    assert 0 < layer.bytes_offloaded < whole.bytes_offloaded


def test_no_bytes_of_a_frozen_weight_move(device_under_test: Device):
    """A weight that is larger than all else: what moved would show it."""

    def program(run: Run) -> None:
        model = run.module(lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 4096)))
        config = LoraConfig(r=2, target_modules=["0", "1"])
        torch.manual_seed(3)
        adapted = get_peft_model(model, config)
        with run.offload():
            loss = adapted(run.tensor(2, 32)).square().sum()
        loss.backward()
        run.check(grads=[p.grad for p in adapted.parameters() if p.requires_grad])

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.bytes_offloaded < 4096 * 32 * 4 / 2


def test_the_tuner_is_where_the_hooks_go(device_under_test: Device):
    """Some versions of PEFT call `forward` of the model inside, and no hook of that model runs."""
    adapted = lora(Run(device_under_test, stock=False, context=None))
    assert isinstance(innermost_model(adapted), BaseTuner)
    assert innermost_model(adapted).model is adapted.get_base_model()
