"""tier="host" without an accelerator: said by the call that the user made, and when it is made."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from module_models import Stack
from torchoffload._contexts import accelerator as _accelerator

needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")


def hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@needs_none
def test_offload_modules_says_so_before_any_forward():
    model = Stack()
    with pytest.raises(RuntimeError, match=r'offload_modules was given tier="host".*Give offload_modules tier="disk"'):
        torchoffload.offload_modules(model, "layers.*")
    assert hook_count(model) == 0


@needs_none
def test_what_is_switched_off_needs_no_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    model = Stack()
    with torchoffload.offload_modules(model, "layers.*"):
        model(torch.ones(16, 32)).backward()


@needs_none
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_callback_of_transformers_says_so_when_training_begins(is_compiled: bool):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from torchoffload.integrations.transformers import OffloadActivationsCallback

    callback = OffloadActivationsCallback()
    model, args = nn.Linear(2, 2), SimpleNamespace(torch_compile=is_compiled)
    with pytest.raises(RuntimeError, match=r'Give OffloadActivationsCallback tier="disk"'):
        callback.on_train_begin(args, None, None, model=model)
    assert hook_count(model) == 0


@needs_none
def test_the_callback_of_lightning_says_so_when_training_begins():
    pytest.importorskip("lightning", reason="lightning is not installed")
    from torchoffload.integrations.lightning import OffloadActivationsCallback

    trainer = SimpleNamespace(strategy=SimpleNamespace(training_step=lambda: None))
    with pytest.raises(RuntimeError, match=r'Give OffloadActivationsCallback tier="disk"'):
        OffloadActivationsCallback().on_train_start(trainer, nn.Linear(2, 2))


class Core:
    """A core for CUDA, of the release build, which must not be asked: it would initialize CUDA's driver."""

    built_with_cuda = True

    @staticmethod
    def accelerator_available() -> bool:
        raise AssertionError("the driver was initialized")


@pytest.mark.parametrize("count", [0, 1])
def test_the_devices_are_counted_without_initializing_cuda(monkeypatch: pytest.MonkeyPatch, count: int):
    """A process that is forked later may use CUDA only if its parent did not."""
    monkeypatch.setattr(_accelerator, "core", Core)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if count:
        _accelerator.require_accelerator("host", "it")
    else:
        with pytest.raises(RuntimeError, match="there is none"):
            _accelerator.require_accelerator("host", "it")


@pytest.mark.devices("cuda")
def test_a_model_that_is_on_the_cpu_yet_is_moved_later(device_under_test: Device):
    def program(run: Run) -> object:
        model = run.module(Stack).cpu()
        if not run.stock:
            torchoffload.offload_modules(model, "layers.*", min_offload_size=0, learn=False)
        model.cuda()
        model(torch.ones(16, 32, device="cuda")).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_same_gradients(program, device=device_under_test)
