"""From a survey to the step that is planned for, by one process or by several ranks together."""

from typing import Any

from torchoffload._contexts.options import OffloadOptions
from torchoffload._core import core
from torchoffload._fit.machine.agreement import Agreement
from torchoffload._fit.machine.link import LinkRates
from torchoffload._fit.plan.step import Step
from torchoffload._fit.survey.kinds import step_of
from torchoffload._fit.survey.measured import together
from torchoffload._fit.survey.survey import Survey

__all__ = ["surveyed_step"]


def surveyed_step(
    survey: Survey, link: LinkRates | None, options: OffloadOptions, agreement: Agreement | None
) -> tuple[Step, list[tuple[Any, ...]]]:
    """Return the surveyed step, and the keys of the kinds of its blocks, by their numbers.

    Parameters
    ----------
    survey : Survey
        A survey that is done.
    link : LinkRates or None
        How fast bytes move; None if nothing may move.
    options : OffloadOptions
        Of the contexts that move.
    agreement : Agreement or None
        The ranks that plan together: for the largest bytes and the longest times of any of them.
    """
    measured, keys = survey.measured()
    kinds = [survey.kinds[key] for key in keys]
    budget = options.budget_bytes
    if budget is None:
        budget = (core.host_memory()["default_budget"] or 0) if options.tier == "host" else 2**62
    rates = LinkRates(1.0, 1.0, 0.0) if link is None else link
    slowest = [-rates.out_bytes_per_s, -rates.in_bytes_per_s, rates.latency_s, -budget]
    if agreement is not None:
        measured = together(agreement.gather(measured))
        slowest = agreement.largest(*slowest)
    step = step_of(
        measured,
        kinds,
        least_moved_bytes=max(1, options.min_offload_bytes),
        tier_bytes=int(-slowest[3]),
        may_move=link is not None,
        out_bytes_per_s=-slowest[0],
        in_bytes_per_s=-slowest[1],
        latency_s=slowest[2],
    )
    return step, keys
