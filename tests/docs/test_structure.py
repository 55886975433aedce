"""test_structure.py: what the sources promise by their shape: floors, words, notes, sizes, and documented names."""

import pathlib
import re

import pytest

from places import ROOT

CSRC = ROOT / "csrc"
FLOORS = ("core", "system", "storage", "device", "engine", "testing", "autograd")

CPP_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp"})
TEST_CPP_FILES = sorted(path for path in (ROOT / "tests").rglob("*") if path.suffix in {".h", ".cpp"})
PYTHON_FILES = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py*")
    if path.suffix in {".py", ".pyi"}
)
SOURCES = [*CPP_FILES, *TEST_CPP_FILES, *PYTHON_FILES]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def includes(path: pathlib.Path) -> list[str]:
    """Names as written, with their quotes or angle brackets."""
    return re.findall(r'^\s*#\s*include\s+(["<][^">]+[">])', path.read_text(), flags=re.MULTILINE)


def of_floors(*floors: str) -> list[pathlib.Path]:
    return [path for path in CPP_FILES if path.relative_to(CSRC).parts[0] in floors]


def one_line(path: pathlib.Path) -> str:
    """The text without line breaks and comment marks, so that a sentence that wraps is found."""
    return re.sub(r"\s*\n\s*(?://+|#+|\*)?\s*", " ", path.read_text())


@pytest.mark.parametrize("path", CPP_FILES, ids=name_of)
def test_includes_point_down(path):
    own_floor = FLOORS.index(path.relative_to(CSRC).parts[0])
    for name in includes(path):
        if name.startswith('"'):
            floor = name.strip('"').split("/")[0]
            assert floor in FLOORS, f"{name} is not named from csrc/"
            assert FLOORS.index(floor) <= own_floor, f"{name} is above {FLOORS[own_floor]}/"


@pytest.mark.parametrize("path", of_floors("core", "system", "storage"), ids=name_of)
def test_core_system_and_storage_know_no_torch_no_cuda_and_no_python(path):
    outside = re.compile(r"<(torch|ATen|c10|caffe2|cuda|nv|pybind11|Python|structmember)")
    assert [name for name in includes(path) if outside.match(name)] == []


@pytest.mark.parametrize("path", of_floors("engine"), ids=name_of)
def test_the_engine_knows_no_torch_and_no_cuda(path):
    """It is compiled without their headers in reach. Of Python it knows the GIL, in one file."""
    assert "<Python.h>" not in includes(path) or name_of(path) == "csrc/engine/operation.cpp"
    assert [name for name in includes(path) if re.match(r"<(torch|ATen|c10|caffe2|cuda|nv|pybind11)", name)] == []
    assert "#ifdef" not in path.read_text()


def test_no_source_asks_which_kinds_of_backend_it_is_compiled_with():
    """Kinds register themselves, and are linked or not. Only their own files and tests include them."""
    kinds = re.compile(r'"(device/(cuda|disk)_|testing/)')
    general = [path for path in of_floors("device", "engine", "autograd") if not re.match("(cuda|disk)_", path.name)]
    assert [name_of(path) for path in CPP_FILES if "WITH_CUDA" in path.read_text()] == []
    assert [name_of(path) for path in general if any(kinds.match(name) for name in includes(path))] == []


@pytest.mark.parametrize("path", of_floors("core"), ids=name_of)
def test_core_knows_no_clock_and_no_thread(path):
    forbidden = {"<chrono>", "<ctime>", "<time.h>", "<thread>", "<mutex>", "<condition_variable>", "<pthread.h>"}
    assert forbidden & set(includes(path)) == set()


def test_pybind11_stands_in_one_file():
    uses = re.compile(r"pybind11|torch/extension\.h|\bpy::")
    code = {path: re.sub(r"//.*", "", path.read_text()) for path in CPP_FILES}
    assert [name_of(path) for path in CPP_FILES if uses.search(code[path])] == ["csrc/autograd/bindings.cpp"]


def test_every_wait_has_a_rule_and_is_made_by_stream_order():
    """A wait of a Backend that wraps something else passes its own call on; that orders nothing by itself."""
    waits = []
    for path in of_floors("device", "engine", "testing", "autograd"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if not re.search(r"(->|\.|\))(wait|wanted)\(", line) or name_of(path) == "csrc/engine/stream_order.cpp":
                continue
            within = " ".join(lines[max(0, number - 3) : number + 2])
            passed_on = re.search(r"\bwait\(StreamId \w+, Point \w+\)", within)
            if not passed_on and not re.search(r"(wait|wanted)\(\s*(Rule::|rule,)", within):
                waits.append(f"{name_of(path)}:{number + 1}: {line.strip()}")
    assert waits == []


def test_every_rule_has_a_wait():
    header = (CSRC / "engine" / "stream_order.h").read_text()
    rules = re.findall(r"^  (\w+) = static_cast<uint8_t>\(Mutant::(\w+)\)", header, flags=re.MULTILINE)
    engine = "".join(path.read_text() for path in of_floors("engine") if "stream_order" not in path.name)
    assert [rule for rule, mutant in rules if rule != mutant] == []
    assert len(rules) > 10
    assert [rule for rule, _ in rules if f"Rule::{rule}" not in engine] == []


def test_what_python_calls_turns_exceptions_into_those_of_python():
    """pybind11 does so for its own functions. An exception that leaves one of CPython's kind ends the process."""
    unguarded = []
    for path in of_floors("autograd"):
        text = path.read_text()
        tables = re.findall(
            r'\{"\w+", (?:reinterpret_cast<PyCFunction>\(reinterpret_cast<void\*>\()?(\w+)\)*, METH_', text
        )
        tables += re.findall(r"\{Py_tp_new, reinterpret_cast<void\*>\((\w+)\)\}", text)
        tables += re.findall(
            r'definition\{"\w+", reinterpret_cast<PyCFunction>\(reinterpret_cast<void\*>\((\w+)\)', text
        )
        for function in tables:
            body = text.split(f" {function}(", 1)[1].split("\n}", 1)
            is_guarded = "HANDLE_TH_ERRORS\n" in body[0] or body[1].startswith(" catch (...) {")
            unguarded += [] if is_guarded else [f"{path.name}: {function}"]
        if path.name == "hooks.cpp":
            assert len(tables) > 10
    assert unguarded == []


def test_what_the_engine_and_the_hooks_remember_of_a_thread_is_in_one_place():
    users = [name_of(path) for path in of_floors("engine", "autograd") if "thread_local" in path.read_text()]
    # The other one is a thread's copy of a table that all threads share, which it reads without the lock.
    assert users == ["csrc/autograd/operator_traits.cpp", "csrc/engine/thread_state.cpp"]


def test_only_the_cuda_files_of_the_device_floor_call_cuda():
    calls = re.compile(r"\bcuda[A-Z]\w*\(")
    users = {name_of(path) for path in CPP_FILES if calls.search(re.sub(r"//.*", "", path.read_text()))}
    assert {name for name in users if not name.startswith("csrc/device/cuda_")} == set()


def test_every_note_that_is_referred_to_exists():
    texts = {name_of(path): one_line(path) for path in [*SOURCES, *DOCUMENTS] if path.name != "test_structure.py"}
    defined = set()
    for path in [*SOURCES, *DOCUMENTS]:
        defined |= set(re.findall(r"^\s*(?://+|#+)\s*Note \[([^\]]+)\]", path.read_text(), flags=re.MULTILINE))
    missing = {
        f"{name}: Note [{note}]"
        for name, text in texts.items()
        for note in re.findall(r"Note \[([^\]]+)\]", text)
        if note not in defined
    }
    assert missing == set()


def test_each_public_name_is_documented():
    import torchoffload

    documented = set(
        re.findall(r"`(?:torchoffload\.)?(\w+)(?:\([^`]*\))?[^`]*`", (ROOT / "docs" / "api.md").read_text())
    )
    assert set(torchoffload.__all__) - documented == set()
    assert [name for name in torchoffload.__all__ if not hasattr(torchoffload, name)] == []


@pytest.mark.parametrize("path", CPP_FILES, ids=name_of)
def test_a_function_fits_a_screen(path):
    """By its braces, as clang-format places them: a body ends where a brace stands in the column of its first line."""
    begun: dict[int, tuple[int, str]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        column = len(line) - len(line.lstrip())
        if re.match(r"\s+(REQUIRES\(|EXCLUDES\(|: \w+\()", line):  # below the first line of its function
            column -= 4
        if line.rstrip().endswith(") {") or re.search(r"\)( const| noexcept| override| mutable)* \{$", line):
            begun[column] = (number, line.strip())
        elif re.fullmatch(r"\s*\}", line) and column in begun:
            first, what = begun.pop(column)
            assert number - first < 60, f"{name_of(path)}:{first}: {what}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_left_to_do(path):
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    assert marks.findall(path.read_text()) == []
