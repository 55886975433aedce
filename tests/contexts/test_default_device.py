"""A default device and dtype of the program's: every tensor that we make ourselves names its own."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import options_of

WIDTH = 16

# Under "meta" whatever does not name its device has no bytes; as the program's own device it lands there.
DEFAULT_DEVICES = ["meta", "own"]


@contextlib.contextmanager
def defaults(default_device: str, device: Device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_device(device.torch_device if default_device == "own" else default_device)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def make(device: Device, seed: int = 1) -> tuple[nn.Sequential, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model = model.to(device.torch_device)
    return model, torch.randn(8, WIDTH, generator=generator).to(device.torch_device)


def gradients(model: nn.Module, x: torch.Tensor, around: contextlib.AbstractContextManager[object]) -> list[object]:
    model.zero_grad(set_to_none=True)
    with around:
        loss = model(x).square().mean()
    loss.backward()
    return [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("default_device", DEFAULT_DEVICES)
def test_a_loop_of_a_context_is_stocks(device_under_test: Device, default_device: str):
    with device_under_test.scope():
        model, x = make(device_under_test)
        expected = gradients(model, x, contextlib.nullcontext())
        context = device_under_test.context()
        torchoffload.reset_stats()
        with defaults(default_device, device_under_test):
            for _ in range(6):
                assert gradients(model, x, context) == expected
            torchoffload.report()
            torchoffload.trim()
        assert torchoffload.stats().bytes_offloaded > 0


@pytest.mark.parametrize("default_device", DEFAULT_DEVICES)
def test_a_version_error_is_stocks(device_under_test: Device, default_device: str):
    """It is raised on a stand-in, which we make."""
    with device_under_test.scope(), device_under_test.context():
        x = torch.ones(8, WIDTH, device=device_under_test.torch_device, requires_grad=True)
        base = (x * 2).exp()
        view = base[1:].exp()
        y = view.exp().sum()
        view.add_(1)
    with defaults(default_device, device_under_test), pytest.raises(RuntimeError, match="inplace operation"):
        y.backward()


@pytest.mark.parametrize("default_device", DEFAULT_DEVICES)
def test_a_loop_of_chosen_modules_is_stocks(device_under_test: Device, default_device: str):
    with device_under_test.scope():
        model, x = make(device_under_test)
        expected = gradients(model, x, contextlib.nullcontext())
        with defaults(default_device, device_under_test):
            chosen = torchoffload.offload_modules(model, ["*.0"], **options_of(device_under_test))
            for _ in range(4):
                assert gradients(model, x, contextlib.nullcontext()) == expected
            chosen.remove()


@pytest.mark.devices("disk", "simulated-late", "cuda")
@pytest.mark.parametrize("default_device", DEFAULT_DEVICES)
def test_a_loop_of_fit_is_stocks(device_under_test: Device, default_device: str):
    """The link is measured in its third step."""
    with device_under_test.scope():
        model, x = make(device_under_test)
        expected = gradients(model, x, contextlib.nullcontext())
        with (
            defaults(default_device, device_under_test),
            torchoffload.fit(model, 1 << 50, **options_of(device_under_test)) as handle,
        ):
            for _ in range(12):
                assert gradients(model, x, contextlib.nullcontext()) == expected
            points = handle.frontier()
            handle.replan(int(points[0].memory_bytes / 0.96) + 1)
            for _ in range(8):
                assert gradients(model, x, contextlib.nullcontext()) == expected
            assert handle.report()


@pytest.mark.parametrize("default_device", ["meta", "cpu"])
def test_what_describes_the_machine_measures_it_all_the_same(default_device: str):
    from torchoffload import info

    with contextlib.ExitStack() as stack:
        torch.set_default_device(default_device)
        stack.callback(torch.set_default_device, None)
        found = info.collect(measure_link=torch.cuda.is_available())
    assert "Only dense CPU tensors" not in str(found)
