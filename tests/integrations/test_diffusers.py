"""diffusers: a denoiser's step, offloaded by a context, by its blocks, and planned."""

from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run, assert_same_gradients
from models import update
from trainings import need, options

need("diffusers")

from diffusers import DDPMScheduler, UNet2DConditionModel  # noqa: E402


def denoiser(run: Run) -> Any:
    config = {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
    }
    return run.module(lambda: UNet2DConditionModel(**config))


def step(run: Run, model: Any) -> None:
    """One step of a text-to-image training: noise at a random time is predicted from a noisy latent and a text."""
    latents, noise, text = run.tensor(2, 4, 8, 8), run.tensor(2, 4, 8, 8), run.tensor(2, 6, 16)
    times = torch.tensor([17, 603], device=run.device)
    noisy = DDPMScheduler().add_noise(latents, noise, times)
    with run.offload():
        loss = torch.nn.functional.mse_loss(model(noisy, times, text).sample, noise)
    loss.backward()
    run.check(loss=loss, step=model)
    update(model)


@pytest.mark.devices("disk", "cuda")
def test_a_context_around_the_denoiser(device_under_test: Device):
    def program(run: Run) -> None:
        model = denoiser(run)
        for _ in range(2):
            step(run, model)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("disk", "cuda")
def test_chosen_blocks_of_the_denoiser(device_under_test: Device):
    def program(run: Run) -> None:
        model = denoiser(run)
        if not run.stock:
            torchoffload.offload_modules(model, ["down_blocks.*", "up_blocks.*"], **options(device_under_test))
        run.offload = lambda: torch.enable_grad()  # type: ignore[method-assign]
        for _ in range(2):
            step(run, model)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("disk")
def test_a_plan_for_the_denoiser(device_under_test: Device):
    def program(run: Run) -> None:
        model = denoiser(run)
        run.offload = lambda: torch.enable_grad()  # type: ignore[method-assign]
        if not run.stock:
            given = options_of(device_under_test)
            handle = torchoffload.fit(model, "1MiB", on_unfit="warn", recompute=False, **given)
        for _ in range(16):
            step(run, model)
        if not run.stock:
            assert handle.plan.moved_bytes > 0, handle.report()

    with pytest.warns(UserWarning, match="torchoffload"):
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)
