"""TRL's SFT, DPO, KTO and Reward trainers, whose context encloses backward too: the same training, with bytes moved."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from devices import Device
from fitted_models import options_of
from gradients import Run, assert_same_gradients
from trainings import (
    ROOM_FOR_ALL,
    STEPS_TO_SETTLE,
    VOCABULARY,
    assert_was_fitted,
    hooks_of,
    memory_of,
    need,
    options,
    tiny_llama,
)

need("transformers", "accelerate", "datasets", "trl", "tokenizers", "peft")

import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import LlamaConfig, LlamaForSequenceClassification  # noqa: E402
from trl.models import activation_offloading as trls_own  # noqa: E402

import torchoffload  # noqa: E402
from hf_trainings import observe_trainer, on_one_device, quiet  # noqa: E402
from torchoffload.integrations.transformers import LogOffloadingCallback, OffloadActivationsCallback  # noqa: E402
from torchoffload.integrations.trl import get_act_offloading_ctx_manager, install  # noqa: E402
from words import sentence, tokenizer  # noqa: E402

NAME = "get_act_offloading_ctx_manager"


def rows(count: int = 8) -> Iterator[tuple[int, str]]:
    for number in range(count):
        yield number, sentence(number, 5 + number % 3)


def classifier(run: Run) -> Any:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        num_labels=1,
    )
    return run.module(lambda: LlamaForSequenceClassification(config))


DATA: dict[str, Callable[[], Dataset]] = {
    "SFT": lambda: Dataset.from_list([{"text": f"{text} {text}"} for _, text in rows()]),
    "DPO": lambda: Dataset.from_list(
        [
            {"prompt": text, "chosen": " " + sentence(n + 1, 6), "rejected": " " + sentence(n + 2, 7)}
            for n, text in rows()
        ]
    ),
    "KTO": lambda: Dataset.from_list(
        [{"prompt": text, "completion": " " + sentence(n + 1, 6), "label": n % 2 == 0} for n, text in rows()]
    ),
    "Reward": lambda: Dataset.from_list(
        [{"chosen": f"{text} {sentence(n + 1, 6)}", "rejected": f"{text} {sentence(n + 2, 7)}"} for n, text in rows()]
    ),
}


def trainer_of(kind: str, run: Run, directory: Path, *, callbacks: Any = (), peft: Any = None, **chosen: Any) -> Any:
    """A trainer of TRL; `activation_offloading` is on where the run is an offloaded one."""
    own = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_checkpointing": False, "bf16": False}
    own |= {"activation_offloading": not run.stock} | chosen
    args = on_one_device(getattr(trl, f"{kind}Config")(**quiet(directory, use_cpu=run.device.type != "cuda", **own)))
    model = classifier(run) if kind == "Reward" else tiny_llama(run)
    more: dict[str, Any] = {"peft_config": peft} if peft else {}
    if kind in ("DPO", "KTO") and not peft:
        more["ref_model"] = tiny_llama(run)
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=DATA[kind](),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        **more,
    )


def assert_same_training(kind: str, directory: Path, device: Device, **chosen: Any) -> Any:
    def program(run: Run) -> None:
        with install(**options(device)):
            trainer = trainer_of(kind, run, directory, **chosen)
        trainer.train()
        observe_trainer(run, trainer)

    return assert_same_gradients(program, device=device)


@pytest.mark.devices("disk", "cuda")
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_the_same_training(kind: str, checkpointing: bool, tmp_path: Path, device_under_test: Device):
    assert_same_training(kind, tmp_path, device_under_test, gradient_checkpointing=checkpointing)


@pytest.mark.devices("disk", "cuda")
@pytest.mark.parametrize("kind", DATA)
def test_lora_with_bf16_and_accumulation(kind: str, tmp_path: Path, device_under_test: Device):
    task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type=task)
    batches = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    assert_same_training(kind, tmp_path, device_under_test, peft=lora, bf16=True, **batches)


@pytest.mark.devices("disk")
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_other_losses_of_sft(loss_type: str, tmp_path: Path, device_under_test: Device):
    assert_same_training("SFT", tmp_path, device_under_test, loss_type=loss_type)


@pytest.mark.devices("disk", "cuda")
def test_the_callback_in_a_trainer_of_trl(tmp_path: Path, device_under_test: Device):
    def program(run: Run) -> None:
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
        trainer = trainer_of("SFT", run, tmp_path, callbacks=ours, activation_offloading=False)
        trainer.train()
        observe_trainer(run, trainer)
        assert hooks_of(trainer.model) == 0

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("disk")
def test_the_callback_and_the_trainers_own_move_nothing_twice(tmp_path: Path, device_under_test: Device):
    alone = assert_same_training("SFT", tmp_path, device_under_test)

    def program(run: Run) -> None:
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
        with install(**options(device_under_test)):
            trainer = trainer_of("SFT", run, tmp_path, callbacks=ours)
        trainer.train()
        observe_trainer(run, trainer)

    with pytest.warns(UserWarning, match="both args.activation_offloading and OffloadActivationsCallback are on"):
        both = assert_same_gradients(program, device=device_under_test)
    assert both.bytes_offloaded <= alone.bytes_offloaded


@pytest.mark.devices("disk")
def test_the_totals_are_logged(tmp_path: Path, device_under_test: Device):
    run = Run(device_under_test, stock=False, context=None)
    with install(**options(device_under_test)):
        trainer = trainer_of("SFT", run, tmp_path, callbacks=[LogOffloadingCallback()])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    assert all(entry["offload/gib_offloaded"] > 0 for entry in logged)


def reward_of_length(completions: list[str], **_columns: Any) -> list[float]:
    """More words are better, and some words are better than others."""
    return [len(text) + 0.1 * (sum(map(ord, text)) % 7) for text in completions]


@pytest.mark.devices("disk", "cuda")
def test_grpo_with_lora_and_the_callback(tmp_path: Path, device_under_test: Device):
    """Its config has no `activation_offloading`, so the callback is the way."""

    def program(run: Run) -> None:
        given = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
        given |= {"gradient_checkpointing": False, "bf16": False, "seed": 3, "temperature": 1.0}
        args = on_one_device(trl.GRPOConfig(**quiet(tmp_path, use_cpu=run.device.type != "cuda", **given)))
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
        trainer = trl.GRPOTrainer(
            model=tiny_llama(run),
            reward_funcs=reward_of_length,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": text} for _, text in rows()]),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
            callbacks=ours,
        )
        trainer.train()
        observe_trainer(run, trainer)
        assert hooks_of(trainer.model) == 0

    assert_same_gradients(program, device=device_under_test)


def trl_modules_having(function: Any) -> set[str]:
    """The modules of TRL whose name of the factory is `function`, or one made of it."""
    having = set()
    for name, module in sys.modules.items():
        value = vars(module).get(NAME) if name.startswith("trl.") else None
        while hasattr(value, "func"):
            value = value.func
        if value is function:
            having.add(name)
    return having


def test_installing_reaches_every_trainer_and_can_be_undone():
    trainers = {f"trl.trainer.{kind.lower()}_trainer" for kind in DATA}
    for kind in DATA:
        assert getattr(trl, f"{kind}Trainer")
    stock = trls_own.get_act_offloading_ctx_manager
    assert trainers <= trl_modules_having(stock)
    first = install(tier="disk")
    second = install(tier="disk", min_offload_size=4096)
    assert trainers <= trl_modules_having(get_act_offloading_ctx_manager)
    assert trl_modules_having(stock) == set()
    first.remove()
    assert trainers <= trl_modules_having(get_act_offloading_ctx_manager), "the second is in place"
    factory = sys.modules["trl.trainer.sft_trainer"].get_act_offloading_ctx_manager
    made = factory(model=torch.nn.Linear(2, 2), warn_if_no_head=False)
    assert made.options.min_offload_size == 4096
    assert made.options.max_fwd_stash_size is None
    second.remove()
    second.remove()
    assert trainers <= trl_modules_having(stock)
    assert trl_modules_having(get_act_offloading_ctx_manager) == set()


@pytest.mark.devices("disk")
def test_a_report_without_the_configurations_switch_names_it(tmp_path: Path, device_under_test: Device):
    run = Run(device_under_test, stock=False, context=None)
    torchoffload.reset_stats()
    with install(**options(device_under_test)):
        trainer_of("SFT", run, tmp_path, activation_offloading=False).train()
        text = torchoffload.report()
        assert "set activation_offloading=True in its configuration, and make the trainer after install()" in text
        trainer_of("SFT", run, tmp_path)
        assert "activation_offloading" not in torchoffload.report()
    assert "activation_offloading" not in torchoffload.report()


def test_a_wrong_option_is_named_when_installing():
    with pytest.raises(TypeError, match="tir"):
        install(tir="disk")
    assert trl_modules_having(get_act_offloading_ctx_manager) == set()


def test_a_trl_without_activation_offloading(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(trls_own, NAME)
    with pytest.raises(ImportError, match=rf"trl {trl.__version__} has no trl\.models\.activation_offloading\.get_act"):
        install(tier="disk")


@pytest.mark.devices("disk")
@pytest.mark.parametrize("kind", DATA)
def test_the_same_training_under_a_plan(kind: str, tmp_path: Path, device_under_test: Device):
    given = options_of(device_under_test)

    def trained(run: Run, memory: int) -> Any:
        installed = install(memory=memory, **given)
        with installed:
            trainer = trainer_of(kind, run, tmp_path, max_steps=STEPS_TO_SETTLE)
        trainer.train()
        observe_trainer(run, trainer)
        if not run.stock:
            assert hooks_of(trainer.model) > 0
            trainer.maybe_activation_offload_context.remove()
        assert hooks_of(trainer.model) == 0
        return installed.fitted, trainer

    room, _trainer = trained(Run(device_under_test, stock=False, context=None), ROOM_FOR_ALL)

    def program(run: Run) -> None:
        fitted, _trainer = trained(run, memory_of(room, 0.3))
        if not run.stock:
            assert_was_fitted(fitted)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


@pytest.mark.devices("disk")
def test_a_model_is_fitted_as_long_as_its_trainer_lives(tmp_path: Path, device_under_test: Device):
    run = Run(device_under_test, stock=False, context=None)
    with install(memory="1GiB", modules="model.layers.*", move=False) as installed:
        assert installed.fitted is None
        trainer = trainer_of("SFT", run, tmp_path)
    trainer.train()
    assert installed.fitted.phase != "removed"
    model = trainer.model
    del trainer
    gc.collect()
    assert installed.fitted.phase == "removed"
    assert hooks_of(model) == 0


@pytest.mark.devices("disk")
def test_what_does_not_go_with_a_plan(tmp_path: Path, device_under_test: Device):
    run = Run(device_under_test, stock=False, context=None)
    with install(memory="1GiB", tier="disk"):
        trainer = trainer_of("SFT", run, tmp_path, gradient_checkpointing=True)
    with pytest.raises(ValueError, match=r"^gradient checkpointing is on in 'model'"):
        trainer.train()
    with install(tier="disk"):
        both = trainer_of("SFT", run, tmp_path, callbacks=[OffloadActivationsCallback(memory="1GiB", tier="disk")])
    with pytest.raises(ValueError, match=r"^args\.activation_offloading is on, .* set activation_offloading=False"):
        both.train()
    with pytest.raises(TypeError, match=r"^move: of torchoffload\.fit, which memory= asks for"):
        install(move=False)
    with pytest.raises(TypeError, match=r"^modules: the blocks of torchoffload\.fit, which memory= asks for"):
        install(modules="model.layers.*", tier="disk")
