"""test_python_packages.py: the Python face by its shape: what is public, and which package may import which."""

import ast
import re
from pathlib import Path

import pytest

import torchoffload

PACKAGE = Path(torchoffload.__file__).resolve().parent
# A file imports from its own line and from those above it. What stands on top uses the public names, too.
LAYERS = (
    ("_core", "_devices", "_warnings"),
    ("_pytorch",),
    ("_contexts",),
    ("_observe",),
    ("_modules", "_checkpoint"),
    ("_fit",),
    ("_estimate", "_selftest"),
    ("_compile",),
)
# The same of the rooms of _fit.
ROOMS = ("machine", "block", "plan", "survey", "choosing", "model")
ON_TOP = ("__init__", "estimate", "info", "integrations", "selftest")
PUBLIC = {"estimate", "info", "integrations", "selftest"}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """The package or module at the top of torchoffload that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The packages and modules of torchoffload that a file imports from; "" is torchoffload itself."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            names.add(str(node.module))
    ours = {name.removeprefix("torchoffload").lstrip(".") for name in names if name.split(".")[0] == "torchoffload"}
    return {name.split(".")[0] for name in ours}


def test_every_file_has_its_place():
    known = {part for layer in LAYERS for part in layer} | set(ON_TOP)
    assert {part_of(path) for path in FILES} == known


def test_nothing_looks_public_that_is_not():
    assert {part_of(path) for path in FILES if not part_of(path).startswith("_")} == PUBLIC
    modules = PUBLIC - set(torchoffload.__all__)  # estimate is a command, and a function
    names = {name for name in dir(torchoffload) if not name.startswith("_")} - modules
    assert names == set(torchoffload.__all__) - {"__version__"}


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) not in ON_TOP], ids=name_of)
def test_imports_point_one_way(path):
    layer = next(index for index, parts in enumerate(LAYERS) if part_of(path) in parts)
    allowed = {part for parts in LAYERS[:layer] for part in parts} | {part_of(path)}
    compiled_core = {""} if part_of(path) == "_core" else set()  # `from torchoffload import _C`
    assert imported_parts(path) <= allowed | compiled_core


# The settings that CUDA alone has: its allocator's segments, and cuDNN's dropout.
OF_CUDA_ALONE = {"_devices.py", "_fit/machine/allocator.py", "_fit/choosing/answers.py"}


def test_one_module_asks_devices():
    """All others ask a device's meter, so that an accelerator other than CUDA is served wherever CUDA is."""
    of_cuda = {name_of(path) for path in FILES if re.search(r"^[^#`]*\btorch\.cuda\b", path.read_text(), re.MULTILINE)}
    assert of_cuda == OF_CUDA_ALONE


def modules_of_fit(path: Path) -> set[str]:
    """The modules of _fit that a file imports from, as "room.module"; also those that it imports for types alone."""
    imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    names = {str(node.module) for node in imports}
    return {name.removeprefix("torchoffload._fit.") for name in names if name.startswith("torchoffload._fit.")}


ROOM_FILES = [path for path in FILES if part_of(path) == "_fit" and path.parent != PACKAGE / "_fit"]


@pytest.mark.parametrize("path", ROOM_FILES, ids=name_of)
def test_rooms_of_fit_import_from_those_before_them(path):
    rooms = {name.split(".")[0] for name in modules_of_fit(path)}
    assert rooms <= set(ROOMS[: ROOMS.index(path.parent.name) + 1])


def test_no_modules_of_fit_import_each_other_in_a_circle():
    imports = {f"{path.parent.name}.{path.stem}": modules_of_fit(path) for path in ROOM_FILES}
    while free := {name for name, needed in imports.items() if not needed & imports.keys()}:
        imports = {name: needed for name, needed in imports.items() if name not in free}
    assert imports == {}
