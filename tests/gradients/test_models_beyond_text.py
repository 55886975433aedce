"""Models beyond text train to the same bits: video diffusion, vision and language, experts, linear attention."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import tokens_and_labels, update
from models_experts import ExpertsConfig, ExpertsModel
from models_linear_attention import ChunkedAttention, LinearAttentionModel
from models_video import VideoTransformer, flow_matching_loss

STEPS = 3


def train(run: Run, model: nn.Module, loss_of: Callable[[int], torch.Tensor], steps: int = STEPS, **options) -> None:
    """Steps of SGD, each under a context of its own; the loss and every gradient are checked."""
    for step in range(steps):
        with run.offload(**options):
            loss = loss_of(step)
        loss.backward()
        run.check(loss=loss, step=model)
        update(model)


# ---- a diffusion transformer ----


def test_a_diffusion_transformer_over_video_latents(device_under_test: Device):
    def program(run: Run):
        model = run.module(VideoTransformer)
        train(run, model, lambda step: flow_matching_loss(run, model))

    assert_same_gradients(program, device=device_under_test)


def test_clips_of_other_lengths_and_sizes(device_under_test: Device):
    """Buckets of resolutions: each batch has another shape."""

    def program(run: Run):
        model = run.module(VideoTransformer)
        shapes = [(3, 8), (1, 12), (5, 4), (3, 8)]
        train(run, model, lambda step: flow_matching_loss(run, model, *shapes[step]), steps=len(shapes))

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_diffusion_transformer_with_checkpointed_blocks(device_under_test: Device, reentrant: bool):
    def program(run: Run):
        model = run.module(VideoTransformer)
        for block in model.blocks:
            block.forward = lambda *inputs, forward=block.forward: checkpoint(forward, *inputs, use_reentrant=reentrant)
        train(run, model, lambda step: flow_matching_loss(run, model))

    assert_same_gradients(program, device=device_under_test)


def test_block_by_block_with_a_context_around_each(device_under_test: Device):
    """The context stands around each block's forward, as pipelines do that wrap their blocks."""

    def program(run: Run):
        model = run.module(VideoTransformer)

        def inside(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def call(*inputs: torch.Tensor) -> torch.Tensor:
                with run.offload():
                    return forward(*inputs)

            return call

        for block in model.blocks:
            block.forward = inside(block.forward)
        for _ in range(STEPS):
            loss = flow_matching_loss(run, model)
            loss.backward()
            run.check(loss=loss, step=model)
            update(model)

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.handles > 0


# ---- vision and language ----


def test_a_vision_language_model_with_a_frozen_tower(device_under_test: Device):
    pytest.importorskip("transformers")
    from models_vision_language import images_and_tokens, llava

    def program(run: Run):
        model = llava(run)
        train(run, model, lambda step: model(**images_and_tokens(run, 12 + 3 * step)).loss)
        run.check(tower=[parameter.grad for parameter in model.model.vision_tower.parameters()])

    assert_same_gradients(program, device=device_under_test)


def test_a_frozen_tower_saves_nothing_and_its_projector_alone_learns(device_under_test: Device):
    pytest.importorskip("transformers")
    from models_vision_language import images_and_tokens, llava

    def program(run: Run):
        model = llava(run)
        model.requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)
        with run.offload():
            packed = torchoffload.stats().handles
            model.model.vision_tower(images_and_tokens(run, 4)["pixel_values"])
            assert torchoffload.stats().handles == packed
        train(run, model, lambda step: model(**images_and_tokens(run, 12)).loss)

    assert_same_gradients(program, device=device_under_test)


# ---- a mixture of experts ----


def experts_program(run: Run, dispatch: str) -> None:
    model = run.module(lambda: ExpertsModel(ExpertsConfig(dispatch=dispatch)))
    batches = [tokens_and_labels(run, tokens=tokens) for tokens in (16, 16, 24, 3)]
    train(run, model, lambda step: model(*batches[step]), steps=len(batches))
    run.check(counts=model.counts)


@pytest.mark.parametrize("dispatch", ["index_add", "permutation"])
def test_a_mixture_of_experts_whose_loads_change(device_under_test: Device, dispatch: str):
    assert_same_gradients(lambda run: experts_program(run, dispatch), device=device_under_test)


def test_experts_that_get_no_token(device_under_test: Device):
    def program(run: Run):
        model = run.module(ExpertsModel)

        def loss_of(step: int) -> torch.Tensor:
            return model(*tokens_and_labels(run, batch=1, tokens=STEPS - step))

        train(run, model, loss_of)
        assert all(counts.count(0) == 2 for counts in model.counts), "one token, sent to two of four experts"

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.8)


@pytest.mark.except_devices("privateuseone")  # they take a histogram of integers, which the CPU refuses
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_the_experts_of_transformers(device_under_test: Device, implementation: str):
    pytest.importorskip("transformers")
    from models_vision_language import mixtral

    def program(run: Run):
        model = mixtral(run, implementation)
        torch.manual_seed(5)

        def loss_of(step: int) -> torch.Tensor:
            tokens, labels = tokens_and_labels(run, tokens=12 + 4 * step)
            return model(input_ids=tokens, labels=labels).loss

        train(run, model, loss_of)

    assert_same_gradients(program, device=device_under_test)


# ---- linear attention ----


def recurrent(q, k, v, gates, first):
    """What `ChunkedAttention` computes, one token after the other, by autograd alone."""
    state, outputs = first, []
    for t in range(q.shape[2]):
        state = gates[:, :, t].exp()[..., None, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, None] @ state).squeeze(-2))
    return torch.stack(outputs, 2), state


@pytest.mark.parametrize("saves_states", [False, True], ids=["recomputed", "saved"])
def test_the_chunked_function_has_the_gradients_of_the_recurrence(saves_states: bool):
    generator = torch.Generator().manual_seed(3)

    def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.rand(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]

    inputs = leaves((2, 2, 21, 4), (2, 2, 21, 4), (2, 2, 21, 5), (2, 2, 21), (2, 2, 4, 5))
    q, k, v, gates, first = inputs
    results = []
    for function in (recurrent, lambda *given: ChunkedAttention.apply(*given, 8, saves_states)):
        output, last = function(q, k, v, -gates, first)
        loss = output.square().sum() + last.sin().sum()
        results.append((output, last, *torch.autograd.grad(loss, inputs)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("saves_states", [False, True], ids=["recomputed", "saved"])
def test_linear_attention_by_custom_functions(device_under_test: Device, saves_states: bool):
    def program(run: Run):
        model = run.module(lambda: LinearAttentionModel(saves_states=saves_states))
        train(run, model, lambda step: model(*tokens_and_labels(run, tokens=21 + step))[0])

    assert_same_gradients(program, device=device_under_test)


def test_a_state_goes_from_segment_to_segment(device_under_test: Device):
    """Backward goes through all segments of a sequence; each was a forward of its own, in a context of its own."""

    def program(run: Run):
        model = run.module(LinearAttentionModel)
        for _ in range(2):
            states, total = None, 0.0
            for _ in range(3):
                with run.offload():
                    loss, states = model(*tokens_and_labels(run, tokens=11), states)
                total = total + loss
            total.backward()
            run.check(total=total, step=model)
            update(model)

    assert_same_gradients(program, device=device_under_test)


def test_linear_attention_under_autocast(device_under_test: Device):
    def program(run: Run):
        model = run.module(LinearAttentionModel)

        def loss_of(step: int) -> torch.Tensor:
            with torch.autocast(run.device.type, torch.bfloat16):
                return model(*tokens_and_labels(run, tokens=19))[0]

        train(run, model, loss_of)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.8)
