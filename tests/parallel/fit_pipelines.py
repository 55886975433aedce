"""Cases of pipelines with ``fit``: each rank fits its own stages, of two layers each."""

import dataclasses
from typing import Any

import torch
from fitting import Fitting, assert_fits, batch_size_of, counted_recomputations, gradients_of
from pipelines import MICRO_BATCHES, data_parallel, exchange, stage_of, stages_of
from torch.distributed import pipelining
from world import SHAPE, TOKENS, World, batch_of, local_values, make_llama

from gradients import Run
from llama import loss_of


def schedule_step(
    world: World,
    schedule: str,
    move: bool,
    budgets: list[float] | None = None,
    parallelism: str | None = None,
    follows_plan: bool = False,
) -> dict:
    """Train with a schedule by name. With ``follows_plan`` as many calls of blocks are computed again as planned."""
    own = stages_of(world, schedule)
    count = world.size * len(own)
    shape, batch = dataclasses.replace(SHAPE, layers=2 * count), batch_size_of(world)
    fitting = Fitting(world, move=move, budgets=budgets)

    def program(run: Run) -> Any:
        modules = [data_parallel(world, make_llama(run, shape, index, count), parallelism) for index in own]
        stages = [stage_of(world, m, index, count, batch) for m, index in zip(modules, own, strict=True)]
        runner = getattr(pipelining.schedules, schedule)(
            stages if len(own) > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss_of
        )
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-2)
        with fitting.fitted(run, *modules) as handles:
            for step in fitting.steps(run):
                tokens, labels = batch_of(run, step, batch=batch * MICRO_BATCHES)
                losses: list[torch.Tensor] = []
                with counted_recomputations() as again:
                    runner.step(
                        *([tokens] if 0 in own else []),
                        **({"target": labels, "losses": losses} if count - 1 in own else {}),
                    )
                run.check(losses=losses, gradients=[gradients_of(module) for module in modules])
                del losses
                optimizer.step()
                optimizer.zero_grad()
            if follows_plan and handles:
                planned = sum(handle._driver.settled.again_count for handle in handles)
                assert again == [planned], f"{again[0]} calls of blocks were computed again, and not {planned}"
        return [local_values(module) for module in modules]

    return assert_fits(fitting, program)


def uneven_loop(world: World, move: bool) -> dict:
    """A plain loop: all forwards, then all backwards; the last micro-batch of a step is smaller than the others."""
    peer, is_first = 1 - world.rank, world.rank == 0
    shape, batch = dataclasses.replace(SHAPE, layers=4), batch_size_of(world)
    sizes = [batch, batch, batch // 2]
    fitting = Fitting(world, move=move)

    def program(run: Run) -> Any:
        model = make_llama(run, shape, world.rank, world.size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def forward(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, labels = batch_of(run, 10 * step + number, batch=sizes[number])
            if is_first:
                output = model(tokens)
                exchange(world, run, None, output, peer)
                return tokens, output
            received = exchange(world, run, (sizes[number], TOKENS, SHAPE.hidden), None, peer).requires_grad_()
            loss = loss_of(model(received), labels)
            run.check(loss=loss.detach())
            return received, loss

        with fitting.fitted(run, model):
            for step in fitting.steps(run):
                alive = [forward(step, number) for number in range(len(sizes))]
                for source, output in alive:
                    if is_first:
                        output.backward(exchange(world, run, tuple(output.shape), None, peer))
                    else:
                        output.backward()
                        exchange(world, run, None, source.grad, peer)
                del alive, source, output
                run.check(gradients=gradients_of(model))
                optimizer.step()
                optimizer.zero_grad()
        return local_values(model)

    return assert_fits(fitting, program)
