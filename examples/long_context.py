"""The longest sequence that trains in a given memory: plain, checkpointed, offloaded, and with both.

A Llama with one sequence as its batch goes forward and backward at growing lengths until memory is used up, in a
process of its own for each way; between the longest that went and the shortest that did not, it bisects. The loss is
computed in chunks that backward computes again, in each way, so that the logits do not decide.

    python examples/long_context.py                       # CUDA: a Llama of 1.1 billion weights; CPU: a tiny one
    python examples/long_context.py --memory-gib 24       # of a larger GPU, what a card of 24 GiB would do
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import _long_context_table
import torchoffload
from _options import add_offload_options, device_of, least_memory_options, positive

GIB = 1 << 30
VARIANTS = ("plain", "checkpointed", "offloaded", "both")
LOSS_CHUNK = 4096
SHAPES = {
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


@dataclass(frozen=True)
class Try:
    """One length: whether it went, and what it took."""

    tokens: int
    went: bool
    seconds: float
    peak_gib: float
    moved_gib: float


class Trainer:
    """Goes forward and backward over one sequence; raises when memory is used up."""

    def __init__(self, arguments: argparse.Namespace, variant: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.device = device_of(arguments)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        shape = SHAPES[arguments.shape]
        config = LlamaConfig(
            **shape, **tokens, max_position_embeddings=1 << 22, use_cache=False, attn_implementation="sdpa"
        )
        with torch.device(self.device):
            self.model = LlamaForCausalLM(config).to(dtype).train()
        if variant in ("checkpointed", "both"):
            for layer in self.model.model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        self._context: Any = contextlib.nullcontext()
        if variant in ("offloaded", "both"):
            # The tiny shape's tensors are small; the minimum of the disk tier would keep them all.
            small = {"min_offload_size": 1 << 14} if arguments.shape == "tiny" else {}
            self._context = torchoffload.OffloadActivations(
                model=self.model, **least_memory_options(arguments), **small
            )
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, count: int) -> None:
        """Forward and backward over ``count`` tokens."""
        tokens = torch.randint(self.model.config.vocab_size, (1, count), device=self.device)
        with self._context:
            hidden = self.model.model(input_ids=tokens).last_hidden_state
        loss = sum(
            checkpoint(self._loss, hidden[:, begin : begin + LOSS_CHUNK], tokens[:, begin + 1 :], use_reentrant=False)
            for begin in range(0, count - 1, LOSS_CHUNK)
        )
        (loss / (count - 1)).backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _loss(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        following = following[:, : hidden.shape[1]]
        logits = self.model.lm_head(hidden[:, : following.shape[1]]).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")


def limit_memory(arguments: argparse.Namespace) -> None:
    """Let no more than ``--memory-gib`` be taken: of the GPU, or of this process beyond what it has by now."""
    if not arguments.memory_gib:
        return
    limit = int(arguments.memory_gib * GIB)
    if device_of(arguments).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
        return
    with open("/proc/self/status", encoding="ascii") as status:
        held = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + limit, held + limit))


def is_out_of_memory(error: BaseException) -> bool:
    signs = ("can't allocate memory", "out of memory", "ALLOC_FAILED")  # PyTorch's on the CPU, CUDA's, cuBLAS's
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def attempt(trainer: Trainer, count: int) -> Try:
    is_cuda = trainer.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    torchoffload.reset_stats()
    start, went = time.perf_counter(), True
    try:
        trainer.step(count)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        went = False
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if is_cuda else 0
    moved = torchoffload.stats().bytes_offloaded
    # The next length must find what this one found: no graph that an exception held, no block of another size.
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
    return Try(count, went, seconds, peak / GIB, moved / GIB)


def search(arguments: argparse.Namespace, variant: str) -> list[Try]:
    """Double the length until it does not go, then bisect; stop when no longer step is over in time."""
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments, variant)
    trainer.step(2 * arguments.granule)  # what is loaded and built on first use is there now
    limit_memory(arguments)
    deadline = time.monotonic() + arguments.seconds
    tries: list[Try] = []
    went, did_not = 0, None
    while did_not is None or did_not - went > max(arguments.granule, went // 16):
        count = (2 * went or arguments.tokens) if did_not is None else (went + did_not) // 2
        count = max(arguments.granule, count // arguments.granule * arguments.granule)
        longest = max((each for each in tries if each.went), key=lambda each: each.tokens, default=None)
        if longest:
            # Attention takes the square of the length, the rest its first power: at most four times for twice the
            # length. Where that is too long, what can be tried in the time that is left.
            left = max(0.0, deadline - time.monotonic())
            fitting = int(longest.tokens * math.sqrt(left / longest.seconds))
            count = min(count, fitting // arguments.granule * arguments.granule)
        if count - went < arguments.granule:
            break
        tries.append(attempt(trainer, count))
        if tries[-1].went:
            went = count
        else:
            did_not = count
        print(f"{variant:>12}: {count:>9,} tokens {'went' if tries[-1].went else 'did not go'}", flush=True)
    return tries


def main() -> int:
    parser = argparse.ArgumentParser(description="Find the longest sequence that trains, in four ways.")
    add_offload_options(parser)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="the Llama (1b on CUDA, tiny on the CPU)")
    parser.add_argument(
        "--memory-gib", type=float, help="the memory to fill (the whole GPU; on the CPU 1/32, beyond what is held)"
    )
    parser.add_argument("--tokens", type=positive, help="the first length (8192 on CUDA, 512 on the CPU)")
    parser.add_argument("--granule", type=positive, help="lengths are multiples of this (1024 on CUDA, 64 on the CPU)")
    parser.add_argument("--seconds", type=float, default=75, help="for the tries of each way (%(default)s)")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="CPU threads of torch")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="which ways")
    parser.add_argument(
        "--json", type=Path, default=Path(sys.argv[0]).with_suffix(".json"), help="all tries (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(sys.argv[0]).with_suffix(".png"), help="the picture (%(default)s)"
    )
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    is_cuda = device_of(arguments).type == "cuda"
    arguments.shape = arguments.shape or ("1b" if is_cuda else "tiny")
    arguments.tokens = arguments.tokens or (8192 if is_cuda else 512)
    arguments.granule = arguments.granule or (1024 if is_cuda else 64)
    if arguments.memory_gib is None and not is_cuda:
        arguments.memory_gib = 1 / 32
    if arguments.variant:
        tries = search(arguments, arguments.variant)
        arguments.result.write_text(json.dumps([asdict(each) for each in tries]))
        return 0

    if find_spec("transformers") is None:
        raise SystemExit("this example needs transformers: pip install transformers")
    results = {variant: _search_in_process(variant) for variant in arguments.variants}
    threads = "1 thread" if arguments.threads == 1 else f"{arguments.threads} threads"
    name = torch.cuda.get_device_name() if is_cuda else f"CPU, {threads}"
    about = {"device": name, "memory_gib": arguments.memory_gib, "shape": SHAPES[arguments.shape]}
    arguments.json.write_text(json.dumps(about | {"tries": results}, indent=1) + "\n")
    print(_long_context_table.table(about, results))
    print(f"all tries: {arguments.json}")
    if _long_context_table.try_draw(about, results, arguments.out):
        print(f"picture: {arguments.out}")
    return 0


def _search_in_process(variant: str) -> list[dict[str, Any]]:
    # One malloc arena, and freed blocks go back at once: under a limit of memory the CPU's tries are alike then.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "tries.json"
        command = [sys.executable, *sys.argv, "--variant", variant, "--result", str(result)]
        child = subprocess.run(command, env=environment, check=False)
        if child.returncode != 0:
            raise SystemExit(f"{variant}: failed with exit status {child.returncode}")
        tries: list[dict[str, Any]] = json.loads(result.read_text())
        return tries


if __name__ == "__main__":
    sys.exit(main())
