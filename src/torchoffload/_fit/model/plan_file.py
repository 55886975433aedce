"""Plans as JSON files, for later runs of the same training."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.block.whole import COMPILED_CALL
from torchoffload._fit.model.snapshot import Snapshot
from torchoffload._fit.plan.step import BlockCall, BlockKind, CallPlan, Output, Step, StepPlan, Way

__all__ = ["SavedPlan", "read_plan", "write_plan"]

_FORMAT = "torchoffload plan 15"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """A plan as it stands in a file.

    Attributes
    ----------
    memory_bytes : int
        The memory that it was made for.
    largest_size : int
        The bytes of the arguments of the model's largest call.
    opener : str
        The part of the model whose call begins the step; empty for the model itself.
    step : Step
        The surveyed step.
    plan : StepPlan
        The plan.
    step_s : float or None
        How long it took when it was tried.
    blocks : list of str
        All blocks of the model that was fitted: other steps may call others than this one.
    names : list of str
        The block of each call.
    operators : list of list of str
        The operators of each kind of block.
    is_of_several : bool
        Whether several ranks made it together.
    """

    memory_bytes: int
    largest_size: int
    opener: str
    step: Step
    plan: StepPlan
    step_s: float | None
    blocks: list[str]
    names: list[str]
    operators: list[list[str]]
    is_of_several: bool

    def modules(self, names: Mapping[nn.Module, str]) -> list[nn.Module]:
        """Return the block of each call, by the names of a model's blocks. ValueError if the model lacks one."""
        by_name = {name: module for module, name in names.items()}
        missing = [name for name in self.names if name not in by_name]
        if missing:
            raise ValueError(f"the plan is for a block {missing[0]!r}, which this model does not have: fit without it")
        return [by_name[name] for name in self.names]

    def opening_module(self, model: nn.Module) -> nn.Module:
        """Return the part of a model whose call begins the step. ValueError if the model lacks it."""
        if self.opener in dict(model.named_modules()):
            return model.get_submodule(self.opener)
        raise ValueError(f"the plan is for a module {self.opener!r}, which this model does not have: fit without it")


def write_plan(fitted: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write the plan that is followed."""
    step, settled = fitted.step, fitted.settled
    if step is None or settled is None:
        raise RuntimeError(f"no plan has been chosen: {fitted.why_over or 'it takes some training steps'}")
    document = {
        "format": _FORMAT,
        "torch": torch.__version__,
        "memory_bytes": fitted.memory_bytes,
        "largest_size": fitted.largest_size,
        "opener": fitted.opener,
        "step": dataclasses.asdict(settled.step),
        "plan": dataclasses.asdict(settled.plan),
        "step_s": settled.step_s,
        "is_of_several": fitted.is_of_several,
        "blocks": fitted.blocks,
        "names": fitted.names,
        "operators": [[str(each) for each in fitted.operators[kind]] for kind in range(len(step.kinds))],
    }
    document = json.loads(json.dumps(document, default=_plain))
    Path(path).write_text(json.dumps(document | {"digest": _digest(document)}), encoding="utf-8")


def _digest(document: dict[str, Any]) -> str:
    """Return a digest by which a document is known to be unchanged: it is not checked number by number."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value)  # an operator


def read_plan(path: str | os.PathLike[str]) -> SavedPlan:
    """Read a plan. ValueError if ``write_plan`` did not write the file."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"its format is {document['format']!r}, and this version's is {_FORMAT!r}")
        if document.pop("digest") != _digest(document):
            raise ValueError("it was changed since")
        step = document["step"]
        kinds = tuple(_kind(kind) for kind in step.pop("kinds"))
        calls = tuple(BlockCall(**call) for call in step.pop("calls"))
        step["between"], step["late"] = tuple(map(tuple, step["between"])), tuple(step["late"])
        plan = document["plan"]
        planned = tuple(CallPlan(**each | {"moved": tuple(each["moved"])}) for each in plan.pop("calls"))
        return SavedPlan(
            memory_bytes=document["memory_bytes"],
            largest_size=document["largest_size"],
            opener=document["opener"],
            step=Step(kinds=kinds, calls=calls, **step),
            plan=StepPlan(calls=planned, **plan),
            step_s=document["step_s"],
            blocks=document["blocks"],
            names=document["names"],
            operators=document["operators"],
            is_of_several=document["is_of_several"],
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"plan {os.fspath(path)!r} is no file that Fitted.save() of this version wrote ({error}): fit without it, "
            "and save it again"
        ) from None


def _kind(given: dict[str, Any]) -> BlockKind:
    outputs = tuple(
        Output(tuple(each["sizes"]), each["ready_s"], tuple(each["operators"]), each["may_move"])
        for each in given["outputs"]
    )
    ways = tuple(
        Way(way["recompute_s"], tuple(way["kept"]), way["input_bytes"], _block_plan(way["plan"]))
        for way in given["ways"]
    )
    return BlockKind(given["forward_s"], given["backward_s"], outputs, ways)


def _block_plan(given: dict[str, Any] | None) -> BlockPlan | None:
    if given is None:
        return None
    sets = {name: frozenset(given[name]) for name in ("kept", "moved", "skipped", "between", "final")}
    return BlockPlan(
        operators=tuple(map(_operator, given["operators"])),
        rewritten=frozenset((number, place) for number, place in given["rewritten"]),
        held=frozenset((number, place) for number, place in given["held"]),
        copies_inputs=given["copies_inputs"],
        **sets,
    )


def _operator(name: str) -> Any:
    """Return the operator of this name, such as "aten.mm.default", or "flex_attention", which runs a graph."""
    if name == str(COMPILED_CALL):
        return COMPILED_CALL
    found: Any = torch.ops if "." in name else torch.ops.higher_order
    for part in name.split("."):
        found = getattr(found, part)
    return found
