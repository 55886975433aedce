"""Random programs: operators, views, in-place changes, custom Functions, checkpoints, contexts, dropped graphs, and
backward in any order, all drawn from a seed. What raises without offloading must raise the same with it.
"""

import contextlib
import gc
import os
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from functions import Fails, KeepsUnpacked, ReadTwice, Save
from gradients import Live, Run, differing, execute, settled

SIDE = 16  # every tensor is SIDE x SIDE, so that any two fit
ACTION_COUNT = 45
PROGRAM_COUNT = int(os.environ.get("TORCHOFFLOAD_RANDOM_PROGRAMS", "200"))  # by device

UNARY = [
    torch.sin,
    torch.exp,
    torch.tanh,
    torch.sigmoid,
    torch.relu,
    torch.nn.functional.gelu,
    lambda t: t.softmax(-1),
    lambda t: torch.nn.functional.dropout(t, 0.3),
    lambda t: torch.nn.functional.rrelu(t, training=True),
    lambda t: torch.nn.functional.layer_norm(t, (SIDE,)),
    lambda t: t.cumsum(0),
    lambda t: t.sort(dim=1).values,
    lambda t: t.clamp(-0.5, 0.5),
    lambda t: t * t,
    lambda t: t * t.t(),
    lambda t: t @ t.t() / SIDE,
    lambda t: t.to(torch.float64).sin().to(torch.float32),
    lambda t: t.to(torch.bfloat16).exp().float().clamp(-9, 9),
    lambda t: torch.view_as_real(torch.complex(t, t * 2).conj() * torch.complex(t * 3, t)).sum(-1),
]
VIEWS = [
    lambda t: t.t(),
    lambda t: t[1:].exp().new_zeros(1, SIDE).expand(SIDE, SIDE) + t,
    lambda t: torch.cat([t[: SIDE // 2], t[SIDE // 2 :].flip(0)]),
    lambda t: t.view(4, 4, SIDE).transpose(0, 1).reshape(SIDE, SIDE),
    lambda t: t[:, :1].expand(SIDE, SIDE),
    lambda t: t[3:4].expand(SIDE, SIDE),
    lambda t: t.as_strided((SIDE, SIDE), (1, SIDE)),
    lambda t: t.diagonal().expand(SIDE, SIDE),
    lambda t: t.detach(),
    lambda t: t.view(-1)[5:].unfold(0, SIDE, 7)[:SIDE],
]
BINARY = [torch.add, torch.mul, torch.matmul, torch.maximum, torch.sub, lambda a, b: torch.where(a > 0, a, b) * b]
IN_PLACE = [
    lambda t: t.add_(1),
    lambda t: t.mul_(0.5),
    lambda t: t.sigmoid_(),
    lambda t: t.relu_(),
    lambda t: t[2:5].zero_(),
    lambda t: t.t().sub_(0.25),
    lambda t: t.detach().mul_(0.9),
]


class Kept(list[torch.Tensor]):
    """What backwards kept for ever, checked as it comes: stock keeps the program's own tensor, which may change."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def append(self, tensor: torch.Tensor) -> None:
        self.run.check(kept=tensor)
        super().append(tensor)


class RandomProgram:
    """One program; called with a run, it does the same in each."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, run: Run) -> None:
        self.run = run
        self.random = random.Random(self.seed)
        self.leaves = [run.leaf(SIDE, SIDE), run.leaf(SIDE, SIDE), run.parameter(SIDE, SIDE)]
        self.tensors = list(self.leaves)
        self.kept = Kept(run)
        self.context = run.offload()
        self.entered: list[contextlib.AbstractContextManager] = []
        for _ in range(ACTION_COUNT):
            with run.raising("action", origin=False):
                self.act()
        while self.entered:
            self.leave()
        with run.raising("last", origin=False):
            sum(tensor.sum() for tensor in self.tensors[3:]).backward()
        run.check(leaves=[(leaf, leaf.grad) for leaf in self.leaves])
        self.tensors, self.leaves = [], []
        self.kept.clear()  # its tensors lead to nodes that hold the list: a cycle that no collector sees

    def act(self) -> None:
        weights = {
            self.enter: 4,
            self.leave: 3,
            self.unary: 14,
            self.view: 6,
            self.binary: 8,
            self.in_place: 2,
            self.custom: 6,
            self.checkpointed: 2,
            self.without_gradients: 1,
            self.read: 2,
            self.drop: 3,
            self.backward: 3,
            self.gradient: 2,
        }
        (action,) = self.random.choices(list(weights), list(weights.values()))
        action()

    def pick(self) -> torch.Tensor:
        # The last ones more often: graphs get deep.
        return self.tensors[max(self.random.randrange(len(self.tensors)), self.random.randrange(len(self.tensors)))]

    def enter(self) -> None:
        if len(self.entered) > 3:
            return
        kind = self.random.choice(["same", "new", "window", "small", "no-op"])
        context = {
            "same": lambda: self.context,
            "new": self.run.offload,
            "window": lambda: self.run.offload(offload_window_bytes=3000, reload_window_bytes=3000),
            "small": lambda: self.run.offload(min_offload_size=600),
            "no-op": self.run.noop,
        }[kind]()
        context.__enter__()
        self.entered.append(context)

    def leave(self) -> None:
        if self.entered:
            self.entered.pop().__exit__(None, None, None)

    def unary(self) -> None:
        self.tensors.append(self.random.choice(UNARY)(self.pick()))

    def view(self) -> None:
        self.tensors.append(self.random.choice(VIEWS)(self.pick()))

    def binary(self) -> None:
        self.tensors.append(self.random.choice(BINARY)(self.pick(), self.pick()) * 0.5)

    def in_place(self) -> None:
        self.random.choice(IN_PLACE)(self.pick())

    def custom(self) -> None:
        kind, x, other = self.random.randrange(5), self.pick(), self.pick()
        if kind == 0:
            result = ReadTwice.apply(x)
        elif kind == 1:
            result = KeepsUnpacked.apply(x, self.kept)
        elif kind == 2:
            result = Save.apply(x, lambda a, b: (a + b).clamp(-1, 1), other.detach(), other.t())
        elif kind == 3:
            result = Save.apply(x, lambda a: None, other[3:9, 2:])
        else:
            result = Fails.apply(x, self.random.choice(["forward", "backward"]), [self.random.random() < 0.2])
        self.tensors.append(result)

    def checkpointed(self) -> None:
        first, second = self.random.choice(UNARY[:6]), self.random.choice(UNARY[:6])
        reentrant = self.random.random() < 0.5
        self.tensors.append(checkpoint(lambda t: second(first(t)) * t, self.pick(), use_reentrant=reentrant))

    def without_gradients(self) -> None:
        with torch.no_grad():
            self.run.check(without=self.random.choice(UNARY[:6])(self.pick()))

    def read(self) -> None:
        node = self.pick().grad_fn
        for name in ("_saved_self", "_saved_result", "_saved_other"):
            if hasattr(node, name):
                self.run.check(read=getattr(node, name))

    def drop(self) -> None:
        if len(self.tensors) > 5:
            del self.tensors[self.random.randrange(3, len(self.tensors))]
        if self.random.random() < 0.2:
            gc.collect()

    def backward(self) -> None:
        self.pick().sum().backward(retain_graph=self.random.random() < 0.7)
        self.run.check(gradients=[leaf.grad for leaf in self.leaves])

    def gradient(self) -> None:
        target, source = self.pick(), self.random.choice(self.leaves)
        create_graph = self.random.random() < 0.4
        (gradient,) = torch.autograd.grad(
            target.square().sum(), source, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        self.run.check(gradient=gradient)
        if create_graph and gradient is not None:
            self.tensors.append(gradient * 0.1)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_random_programs_come_out_as_stock(device_under_test: Device):
    moved_bytes, failures = 0, []
    for seed in range(PROGRAM_COUNT):
        device_under_test.seed = seed
        program = RandomProgram(seed)
        stock, again = (execute(program, device_under_test, stock=True) for _ in range(2))
        assert stock == again, f"program {seed} is not bit-stable: {differing(stock, again)}"
        live = Live.now()
        torchoffload.reset_stats()
        offloaded = execute(program, device_under_test, stock=False)
        moved_bytes += torchoffload.stats().bytes_offloaded
        if offloaded != stock:
            failures.append(f"program {seed}: {differing(stock, offloaded)[:600]}")
        if settled(live) != live:
            failures.append(f"program {seed}: {Live.now()} is left, not {live}")
    assert not failures, f"{len(failures)} of {PROGRAM_COUNT}:\n" + "\n".join(failures[:5])
    assert moved_bytes > PROGRAM_COUNT * 5 * SIDE * SIDE * 4
