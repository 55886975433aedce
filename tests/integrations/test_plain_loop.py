"""A plain loop like torchtitan's: layers in a ModuleDict, the loss outside of the model, no trainer and no adapter.

What is recommended: the factory once, since it exempts the output head, and its context around forward and loss. Around
backward as well it is right too, which a loop that enters its contexts once a step relies on.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import Block, tokens_and_labels, update
from trainings import options


class Decoder(nn.Module):
    """The shape of a decoder whose stages may lack an embedding or a head: each part may be None."""

    def __init__(self, depth: int = 3, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleDict({str(number): Block(width) for number in range(depth)})
        self.norm: nn.Module | None = nn.LayerNorm(width)
        self.output: nn.Module | None = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


class Checkpointed(nn.Module):
    """A layer that is run again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def as_it_is(model: Decoder) -> None:
    pass


def checkpoint_each_layer(model: Decoder) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = Checkpointed(layer)


def compile_each_layer(model: Decoder) -> None:
    for layer in model.layers.values():
        layer.compile(backend="aot_eager")


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train(
    run: Run, device: Device, prepare: Callable[[Decoder], None], *, around_backward: bool, micro_batches: int
) -> None:
    model: Any = run.module(Decoder)
    prepare(model)
    offload: Any = contextlib.nullcontext()
    if not run.stock:
        offload = torchoffload.get_act_offloading_ctx_manager(model, **options(device))
    for _ in range(3):
        for _ in range(micro_batches):
            tokens, labels = tokens_and_labels(run)
            with contextlib.ExitStack() as contexts:
                with offload if not around_backward else contexts.enter_context(offload) or contextlib.nullcontext():
                    loss = cross_entropy(model(tokens), labels) / micro_batches
                loss.backward()
            run.check(loss=loss)
        run.check(gradients=model)
        update(model)


@pytest.mark.devices("disk", "cuda")
@pytest.mark.parametrize("prepare", [as_it_is, checkpoint_each_layer, compile_each_layer])
@pytest.mark.parametrize("around_backward", [False, True])
def test_the_same_training(prepare, around_backward: bool, device_under_test: Device):
    def program(run: Run) -> None:
        torch._dynamo.reset()
        train(run, device_under_test, prepare, around_backward=around_backward, micro_batches=2)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("disk", "cuda")
def test_chosen_layers_of_the_dictionary(device_under_test: Device):
    def program(run: Run) -> None:
        model: Any = run.module(Decoder)
        handle = None
        if not run.stock:
            handle = torchoffload.offload_modules(model, ["layers.0", "layers.1"], **options(device_under_test))
        for _ in range(2):
            tokens, labels = tokens_and_labels(run)
            cross_entropy(model(tokens), labels).backward()
            run.check(gradients=model)
            update(model)
        if handle is not None:
            handle.remove()

    assert_same_gradients(program, device=device_under_test)
