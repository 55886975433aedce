"""What is compared: each offloader by name, as a context for the forward of one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import peers
from peers import CannotRun
from workloads import enable_checkpointing

STOCK = "none"
OURS = "torchoffload"
LEAST_COMPILED_BYTES = 64 << 10  # torchoffload's own default

# Called before each forward; what it returns is entered around it.
MakeContext = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Options:
    """What offloaders are made with: torchoffload's options, and where the others' packages are."""

    tier: str = "host"
    offload_window_bytes: int | None = None
    reload_window_bytes: int | None = None
    peers: Path | None = None


@dataclass(frozen=True)
class Offloader:
    """One way to run a step.

    ``make`` puts what it needs around the model, and returns what makes the context of each forward.
    """

    make: Callable[[torch.nn.Module, Options], MakeContext]
    package: str | None = None  # whose version is recorded
    compared_with: str = STOCK  # whose gradients it has to meet
    encloses_backward: bool = False  # the context is left after backward, as its own trainers do
    needs_cuda: bool = True


def _torchoffload(model: torch.nn.Module, options: Options) -> MakeContext:
    import torchoffload

    windows = {"offload_window_bytes": options.offload_window_bytes, "reload_window_bytes": options.reload_window_bytes}
    given = {name: size for name, size in windows.items() if size is not None}
    context = torchoffload.get_act_offloading_ctx_manager(model, tier=options.tier, **given)
    return lambda: context


def _save_on_cpu(_model: torch.nn.Module, _options: Options) -> MakeContext:
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _torchtune(model: torch.nn.Module, options: Options) -> MakeContext:
    # torchtune's models call their head so, and it exempts the module of that name. As a plain attribute it is no
    # second child of the model.
    vars(model)["output"] = model.lm_head
    module = peers.load_torchtune(peers.search_path(options.peers))
    context = module.get_act_offloading_ctx_manager(model, enable_activation_offloading=True)
    return lambda: context


def _trl(model: torch.nn.Module, options: Options) -> MakeContext:
    module = peers.load_trl(peers.search_path(options.peers))
    context = module.get_act_offloading_ctx_manager(model)
    return lambda: context


def _transformers(model: torch.nn.Module, _options: Options) -> MakeContext:
    if not getattr(model, "is_gradient_checkpointing", False):
        raise CannotRun("it offloads the inputs of checkpoints: give a workload with checkpointed=1, such as D")
    try:
        enable_checkpointing(model, offload=True)
    except TypeError as error:
        raise CannotRun("this transformers cannot offload the inputs of checkpoints (5.17 can)") from error
    return contextlib.nullcontext


def _compiled(model: torch.nn.Module, _options: Options) -> MakeContext:
    for layer in model.get_submodule("model.layers").children():
        layer.compile()
    return contextlib.nullcontext


def _mark_to_offload(joint: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
    """Ask AOT to offload what the layer computes and saves: it leaves out views, and what is one of several results.

    The layer's inputs are not asked for: weights are among them, and nothing tells them from the others.
    """
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.nbytes >= LEAST_COMPILED_BYTES:
            node.meta["should_offload"] = True
    return joint


def _compiled_offload(model: torch.nn.Module, options: Options) -> MakeContext:
    from torch._functorch import config

    if not hasattr(config, "enable_activation_offloading"):
        raise CannotRun(f"torch {torch.__version__} has no activation offloading in AOT")
    if getattr(model, "is_gradient_checkpointing", False):
        raise CannotRun("inside a checkpoint a compiled layer saves nothing in forward: give a workload without")
    config.enable_activation_offloading = True
    config.joint_custom_pass = _mark_to_offload
    config.enable_autograd_cache = False  # its key does not know the pass
    if torch.cuda.is_available():
        config.activation_offload_separate_stream = True
        config.activation_offload_sink_wait = True
        config.activation_reload_prefetch = True
    return _compiled(model, options)


# An offloader more is one more entry.
OFFLOADERS = {
    STOCK: Offloader(lambda _model, _options: contextlib.nullcontext, needs_cuda=False),
    OURS: Offloader(_torchoffload, package="torchoffload", needs_cuda=False),
    "save_on_cpu": Offloader(_save_on_cpu, needs_cuda=False),
    "torchtune": Offloader(_torchtune, package="torchtune"),
    "trl": Offloader(_trl, package="trl", encloses_backward=True),
    "transformers": Offloader(_transformers, package="transformers"),
    "compiled": Offloader(_compiled, needs_cuda=False),
    "compiled_offload": Offloader(_compiled_offload, compared_with="compiled", needs_cuda=False),
}
