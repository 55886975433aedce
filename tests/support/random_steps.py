"""random_steps.py: what is planned for: random blocks and steps of blocks, and those of a Llama."""

import random

import torch
from torch import nn
from torch.nn import functional

from planned_blocks import record
from torchoffload._fit.block.graph import BlockPlan, OperatorGroup
from torchoffload._fit.block.record import BlockRecord
from torchoffload._fit.plan.step import BlockCall, BlockKind, Output, Step, Way
from torchoffload._fit.survey.kinds import hull

PAGE = 4096
MIB = 1 << 20
AGAIN = BlockPlan(operators=())


# ---- blocks ----


def random_groups(seed: int) -> tuple[list[OperatorGroup], list[int]]:
    """Operators in order, most of which read the one or two before; and those that draw random numbers."""
    chosen = random.Random(seed)
    count = chosen.randint(8, 40)
    groups = []
    for number in range(count):
        inputs = {max(0, number - chosen.choice((1, 1, 1, 2, 3, 7))) for _ in range(chosen.randint(1, 3))} - {number}
        groups.append(
            OperatorGroup(
                operators=(number,),
                duration_ns=chosen.choice((chosen.randint(1, 20), chosen.randint(50, 2000))),
                sizes=(chosen.choice((0, 100, PAGE, 8 * PAGE, 8 * PAGE, 32 * PAGE, 31 * PAGE + 1)),),
                inputs=tuple(sorted(inputs)),
                may_keep=chosen.random() < 0.9,
                may_recompute=chosen.random() < 0.93,
                is_needed=chosen.random() < 0.5,
            )
        )
    draws = sorted(chosen.sample(range(count), 2)) if chosen.random() < 0.4 else []
    return groups, draws


class LlamaBlock(nn.Module):
    """A decoder block as a Llama has it: RMS norms, rotated queries and keys, and a gated MLP."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]), 0.5 ** torch.arange(x.shape[-1] // 2)).repeat(1, 2)
        low, high = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (each(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


def llama_record() -> BlockRecord:
    """With times that only depend on what an operator is and makes, in place of those of this machine."""
    made = record(LlamaBlock(), torch.randn(2, 96, 64))
    for call in made.operators:
        nbytes = sum(made.nbytes[storage] for storage in call.makes)
        is_product = any(part in str(call.operator) for part in ("mm", "attention"))
        call.duration_ns = 1000 + nbytes * (40 if is_product else 1) // 50
    return made


# ---- steps ----


def random_output(chosen: random.Random, ready_s: float) -> Output:
    """32 to 256 MiB, mostly in one storage; few do not move."""
    nbytes = chosen.choice((32, 32, 64, 128, 256)) * MIB
    sizes = (nbytes // 4 * 3, nbytes // 4) if chosen.random() < 0.1 else (nbytes,)
    return Output(sizes, ready_s, may_move=chosen.random() < 0.95)


def random_kind(chosen: random.Random, most_outputs: int) -> BlockKind:
    """A block of some milliseconds; its ways keep the outputs first that save the most time a byte, or some others."""
    forward_s = chosen.choice((1.0, 1.0, 0.3)) * chosen.uniform(0.003, 0.008)
    count = chosen.randint(min(3, most_outputs), most_outputs)
    outputs = tuple(random_output(chosen, forward_s * (number + 1) / count) for number in range(count))
    shares = [chosen.choice((0.05, 0.3, 1.0, 2.0)) for _ in outputs]
    costs = [0.95 * forward_s * share / sum(shares) for share in shares]
    input_bytes = chosen.choice((32, 64)) * MIB
    order = sorted(range(count), key=lambda number: -costs[number] / outputs[number].nbytes)
    choices = [set(order[:kept]) for kept in range(count)]
    choices += [set(chosen.sample(range(count), chosen.randint(0, count - 1))) for _ in range(3)]
    ways = [Way(0.0, tuple(range(count)), input_bytes)]
    for kept in choices:
        again_s = 0.02 * forward_s + sum(costs[number] for number in range(count) if number not in kept)
        ways.append(Way(again_s, tuple(sorted(kept)), input_bytes, AGAIN))
    return BlockKind(forward_s, 2 * forward_s, outputs, tuple(hull(ways, outputs)))


def random_step(seed: int, *, may_move: bool, most_calls: int = 16, most_outputs: int = 9) -> Step:
    """Blocks of one to three kinds, in turn or one kind after the other; gradients may pile up in backward."""
    chosen = random.Random(seed)
    kinds = tuple(random_kind(chosen, most_outputs) for _ in range(chosen.randint(1, 3)))
    count = chosen.randint(min(4, most_calls), most_calls)
    in_turn = chosen.random() < 0.5
    of_calls = [number % len(kinds) if in_turn else number * len(kinds) // count for number in range(count)]
    base, gradient = chosen.randint(4000, 16000), chosen.choice((0, 50, 200))
    beside = [chosen.randint(100, 800) for _ in kinds]
    own = [sum(output.nbytes for output in kind.outputs) // MIB for kind in kinds]
    calls = tuple(
        BlockCall(
            kind, (base + beside[kind]) * MIB, (base + beside[kind] + own[kind] + gradient * (count - number)) * MIB
        )
        for number, kind in enumerate(of_calls)
    )
    rate = chosen.choice((12e9, 25e9, 55e9))
    return Step(
        kinds=kinds, calls=calls, head_s=1e-3, loss_s=chosen.choice((2e-3, 10e-3)), end_s=1e-3,
        loss_bytes=(base + chosen.choice((200, 1500, 4000))) * MIB, least_moved_bytes=MIB, may_move=may_move,
        out_bytes_per_s=rate, in_bytes_per_s=rate,
    )  # fmt: skip


def llama_step(*, rate: float | None) -> Step:
    """16 blocks with long and short attention in turn: 5 ms of forward, 10 ms of backward, 32 or 128 MiB an output."""
    made = ((32, 0.03), (32, 0.12), (32, 0.16), (32, 0.2), (32, 0.45), (32, 0.5), (32, 0.53), (128, 0.7), (128, 0.85),
            (128, 0.87), (128, 0.9))  # fmt: skip
    outputs = tuple(Output((mib * MIB,), 5e-3 * part) for mib, part in made)
    by_use = (4, 1, 5, 2, 3, 7, 8, 6, 0, 10, 9)  # the attention first, the MLP's products last
    kinds = []
    for attention_ms in (1.2, 0.3):
        costs = [1e-3 * ms for ms in (0.2, 0.6, 0.3, 0.3, attention_ms, 0.5, 0.2, 1.1, 1.1, 0.1, 0.1)]
        ways = [Way(0.0, tuple(range(len(outputs))), 32 * MIB)]
        for count in range(len(outputs)):
            again_s = 1e-4 + sum(costs[number] for number in by_use[count:])
            ways.append(Way(again_s, tuple(sorted(by_use[:count])), 32 * MIB, AGAIN))
        kinds.append(BlockKind(5e-3, 10e-3, outputs, tuple(hull(ways, outputs))))
    return Step(
        kinds=tuple(kinds), calls=tuple(BlockCall(number % 2, 20_000 * MIB, 20_800 * MIB) for number in range(16)),
        head_s=1e-3, loss_s=10e-3, end_s=1e-3, loss_bytes=22_000 * MIB, least_moved_bytes=MIB,
        may_move=rate is not None, out_bytes_per_s=rate or 1.0, in_bytes_per_s=rate or 1.0, latency_s=2e-5,
    )  # fmt: skip
