"""shrink.py: cuts a failing program down, greedily, for as long as it fails in the same way."""

import copy
from collections.abc import Callable, Iterator

from programs.program import Program, Step, bodies_of

_SOURCES = ("x", "y")


def shrink(program: Program, still_fails: Callable[[Program], bool], *, attempts: int = 2000) -> Program:
    """The smallest program found in at most `attempts` runs of `still_fails`."""
    while True:
        smaller = None
        for candidate in _candidates(program):
            attempts -= 1
            if attempts < 0:
                return program
            if still_fails(candidate):
                smaller = candidate
                break
        if smaller is None:
            return program
        program = smaller


def _candidates(program: Program) -> Iterator[Program]:
    """Smaller ones, the boldest first."""
    for steps in _without_runs(program.steps):
        yield _with_steps(program, steps)
    for steps in _simpler(program.steps):
        yield _with_steps(program, steps)
    for index, options in enumerate(program.contexts):
        for name in options:
            contexts = copy.deepcopy(program.contexts)
            del contexts[index][name]
            yield Program(program.seed, contexts, program.watches_storages, program.steps)
    if len(program.contexts) > 1:
        yield Program(program.seed, program.contexts[:-1], program.watches_storages, program.steps)


def _with_steps(program: Program, steps: list[Step]) -> Program:
    return Program(program.seed, program.contexts, program.watches_storages, steps)


def _bodies(steps: list[Step]) -> Iterator[list[Step]]:
    yield steps
    for step in steps:
        for body in bodies_of(step):
            yield from _bodies(body)


def _edited(steps: list[Step], number: int, edit: Callable[[list[Step]], None]) -> list[Step]:
    """A copy whose body of that number, in the order of `_bodies`, is edited."""
    copied = copy.deepcopy(steps)
    for index, body in enumerate(_bodies(copied)):
        if index == number:
            edit(body)
            break
    return copied


def _without_runs(steps: list[Step]) -> Iterator[list[Step]]:
    """Runs of steps left out of a body, long ones first and late ones first."""
    bodies = list(_bodies(steps))
    longest = max(len(body) for body in bodies)
    length = 1 << max(longest - 1, 0).bit_length()
    while length:
        for number, body in enumerate(bodies):
            for first in range(len(body) - length, -1, -max(length // 2, 1)):
                yield _edited(steps, number, lambda b, f=first, n=length: b.__delitem__(slice(f, f + n)))
        length //= 2


def _simpler(steps: list[Step]) -> Iterator[list[Step]]:
    for number, body in enumerate(_bodies(steps)):
        for index, step in enumerate(body):
            if "body" in step:  # the body in its place
                yield _edited(steps, number, lambda b, i=index: b.__setitem__(slice(i, i + 1), b[i]["body"]))
            if "out" in step and "x" in step:  # left out, what it made standing for what it was made of
                shorter = _edited(steps, number, lambda b, i=index: b.__delitem__(i))
                yield _renamed(shorter, step["out"], step["x"])
            for name, simple in (("op", "sin"), ("chain", ["sin"]), ("fresh", False), ("guarded", True)):
                if step["do"] in ("unary", "checkpoint", "with") and name in step and step[name] != simple:
                    if name == "op" and step["do"] == "checkpoint":
                        simple = "plain"
                        if step[name] == simple:
                            continue
                    yield _edited(steps, number, lambda b, i=index, n=name, s=simple: b[i].__setitem__(n, s))
            for name in ("of", "source", "leaves", "chain"):
                for part in range(len(step.get(name, [])) if len(step.get(name, [])) > 1 else 0):
                    yield _edited(steps, number, lambda b, i=index, n=name, p=part: b[i][n].__delitem__(p))


def _renamed(steps: list[Step], before: str, after: str) -> list[Step]:
    for body in _bodies(steps):
        for step in body:
            for name in _SOURCES:
                if step.get(name) == before:
                    step[name] = after
            for name in ("of", "source", "inputs", "leaves"):
                if name in step:
                    step[name] = [after if each == before else each for each in step[name]]
    return steps
