"""script.py: a program as a Python script that runs it again, to be saved and read."""

import json
from collections.abc import Iterator

from programs.program import BODIES, Program, Step, bodies_of

_SCRIPT = '''"""{what}

Save this, and run it from the repository's root: python3 FILE. What a step does is said by
tests/support/programs/interpreter.py.
"""

import sys

sys.path.insert(0, "tests/support")

from fuzz_programs import run_again
from programs.program import Program

PROGRAM = Program(
    seed={seed},
    contexts=[
{contexts}
    ],
    watches_storages={watches_storages},
    steps=[
{steps}
    ],
)

sys.exit(run_again(PROGRAM, "{device}"))
'''


def as_script(program: Program, device: str, what: str) -> str:
    """A script that judges `program` on `device`, and exits with 1 where it is not as stock. `what` opens it."""
    return _SCRIPT.format(
        what=what.replace("\\", "\\\\").replace('"""', "'''"),
        seed=program.seed,
        contexts="\n".join(f"        {_literal(options)}," for options in program.contexts),
        watches_storages=program.watches_storages,
        steps="\n".join(_lines(program.steps, 2)),
        device=device,
    )


def _literal(value: object) -> str:
    """As Python, with the quotes of the rest of the script."""
    text = json.dumps(value)
    for name, python in (("true", "True"), ("false", "False"), ("null", "None")):
        text = text.replace(f": {name}", f": {python}")
    return text


def _lines(steps: list[Step], depth: int) -> Iterator[str]:
    indent = "    " * depth
    for step in steps:
        bodies = bodies_of(step)
        if not bodies:
            yield f"{indent}{_literal(step)},"
            continue
        head = _literal({name: value for name, value in step.items() if name not in BODIES})[:-1]
        yield f'{indent}{head}, "{"body" if "body" in step else "bodies"}": ['
        if "body" in step:
            yield from _lines(bodies[0], depth + 1)
        else:
            for body in bodies:
                yield f"{indent}    ["
                yield from _lines(body, depth + 2)
                yield f"{indent}    ],"
        yield f"{indent}]}},"
