"""Blocks of random operators, under plans of random choices: the same bits as stock.

1,200 of them, and 5,300 if TORCHOFFLOAD_TEST_LONG is set.
"""

import dataclasses
import os
import pathlib
import random

import pytest
import torch

import torchoffload
from random_blocks import RandomNet, differences, outcome
from torchoffload._fit.block.blocks import plan_block, unplan_block
from torchoffload._fit.block.graph import BlockPlan, block_frontier
from torchoffload._fit.block.record import Recorder

CHUNK = 25  # blocks in a test
COUNT = 5300 if os.environ.get("TORCHOFFLOAD_TEST_LONG") else 1200


def plans_of(seed: int) -> list[BlockPlan]:
    """Corners of the frontier for several guesses of what operators take, and plans that nobody would make."""
    net = RandomNet(seed)
    block = net.blocks[0]
    with torch.random.fork_rng(), Recorder(block, ((net.x,), {})) as recorder:
        block(net.x)
    record = recorder.record
    choice = random.Random(seed)
    plans = [BlockPlan(operators=())]
    for _ in range(3):
        for call in record.operators:
            call.duration_ns = choice.randrange(1, 1000)
        plans += [corner.plan for corner in block_frontier(record)]
    anything = frozenset(number for number in range(len(record.operators)) if choice.random() < 0.5)
    plans.append(BlockPlan(operators=tuple(call.operator for call in record.operators), kept=anything))
    return [plans[0], plans[-1], *choice.sample(plans, min(2, len(plans)))]


def check(seed: int, directory: pathlib.Path) -> None:
    try:
        wanted = outcome(RandomNet(seed))
    except RuntimeError:
        return  # stock raises
    for number, plan in enumerate(plans_of(seed)):
        for moves in (False, True):
            net = RandomNet(seed)
            for block in net.blocks:
                plan_block(block, dataclasses.replace(plan, moved=plan.kept if moves else frozenset()))
            if moves:
                with torchoffload.OffloadActivations(tier="disk", disk_dir=str(directory), min_offload_size=0):
                    found = outcome(net)
            else:
                found = outcome(net)
            different = differences(wanted, found)
            assert not different, f"block {seed}, plan {number}, moves {moves}: {different}"
            for block in net.blocks:
                unplan_block(block)


def run_chunk(first: int, directory: pathlib.Path) -> None:
    for seed in range(first, first + CHUNK):
        check(seed, directory)


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_random_blocks(first: int, tmp_path: pathlib.Path):
    run_chunk(first, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, COUNT, CHUNK))
def test_many_random_blocks(first: int, tmp_path: pathlib.Path):
    run_chunk(first, tmp_path)
