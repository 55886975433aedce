"""A table of estimates: which way to train language models of 1, 7 and 13 billion parameters on three cards.

    python benchmarks/estimates.py [--out estimates.md]

Needs transformers, and neither a GPU nor memory. All numbers are arithmetic by ``torchoffload.estimate``. One sequence
is trained in bfloat16: all parameters with AdamW in 8 bits, or an adapter (LoRA of rank 16 at all linear layers) beside
frozen weights. A cell has the way that is advised with the time of forward and backward beside that of the plain step,
were there memory for that, and the peak. At most 64 GiB move to host memory. A plain step has room if 1.1 times its
peak is there, since the allocator reserves more than it hands out.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from torchoffload import Estimate
from torchoffload._estimate.cards import find_card
from torchoffload._estimate.dry_step import Setting
from torchoffload._estimate.estimate import room_of, tell, traces_of
from torchoffload._estimate.optimizers import find_optimizer

_GIB = float(2**30)
_HOST_BYTES = 64 << 30
_CARDS = ("RTX 4090", "A100 40GB", "A100 80GB")
_LENGTHS = (4096, 16_384, 65_536)
_MODELS = {  # hidden, intermediate, layers, heads, key and value heads: TinyLlama, Llama 2 7B and 13B
    "1B": (2048, 5632, 22, 32, 4),
    "7B": (4096, 11_008, 32, 32, 32),
    "13B": (5120, 13_824, 40, 40, 40),
}
_NAMES = {"plain": "as it is", "move": "moved", "checkpoint": "checkpoints", "fit": "`fit`"}


class _Adapted(nn.Module):
    """A frozen linear layer with a low-rank product beside it."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(rank, linear.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def _adapt(model: nn.Module, rank: int = 16) -> None:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, _Adapted(child, rank))


def _model(shape: tuple[int, ...], length: int, *, adapter: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads = shape
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=32_000, max_position_embeddings=length, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        if adapter:
            _adapt(model)
    return model.train()


def _cell(found: Estimate) -> str:
    if found.way == "none":
        needed = found.plain if found.fit_least is None else min(found.fit_least, found.plain, key=_peak)
        return f"needs {needed.peak_bytes / _GIB:.0f} GiB"
    steps = {"plain": found.plain, "move": found.moved, "checkpoint": found.checkpointed, "fit": found.fit}
    step = steps[found.way]
    assert step is not None
    return f"{_NAMES[found.way]} {step.step_ms / found.plain.step_ms:.2f}, {step.peak_bytes / _GIB:.0f} GiB"


def _peak(step: object) -> int:
    return step.peak_bytes  # type: ignore[attr-defined,no-any-return]


def rows(models: dict[str, tuple[int, ...]], lengths: tuple[int, ...], cards: tuple[str, ...]) -> list[list[str]]:
    """Return the cells of the table."""
    found = []
    optimizer = find_optimizer("adamw-8bit")
    for name, shape in models.items():
        for adapter in (False, True):
            for length in lengths:
                model = _model(shape, length, adapter=adapter)
                tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
                traces = traces_of(model, (), {"input_ids": tokens, "labels": tokens}, Setting())
                told = [tell(traces, card, optimizer, room_of(card), _HOST_BYTES) for card in map(find_card, cards)]
                plain = told[0]
                fixed = plain.weights_bytes + plain.gradients_bytes + plain.optimizer_bytes
                row = [f"{name}, {'LoRA' if adapter else 'all parameters'}", f"{length // 1024}k"]
                row += [f"{fixed / _GIB:.1f}", f"{plain.saved_bytes / _GIB:.1f}", *map(_cell, told)]
                print(row, file=sys.stderr, flush=True)
                found.append(row)
    return found


def table(cells: list[list[str]], cards: tuple[str, ...]) -> str:
    """Return the table in Markdown."""
    head = ["model", "tokens", "weights, gradients, optimizer, GiB", "saved, GiB", *cards]
    lines = [f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *cells)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the table; default: the terminal")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    text = table(rows(_MODELS, _LENGTHS, _CARDS), _CARDS)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
