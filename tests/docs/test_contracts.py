"""test_contracts.py: each header opens with its contract: what it is, who owns what, and which threads may call it."""

import pathlib
import re

import pytest

from places import ROOT

CSRC = ROOT / "csrc"
HEADERS = sorted(CSRC.rglob("*.h"))
CPP_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".def"})
MAX_COLUMNS = 120

# The entries of a contract, in their order. Each header has the first two.
ENTRIES = (
    "Ownership",
    "Thread safety",
    "Failures",
    "Stream order",
    "Invariants",
    "Shutdown",
    "Cost",
    "Not handled",
)
ENTRY = re.compile(rf"// (?P<name>{'|'.join(ENTRIES)}): +(?P<text>\S.*)")
TEXT_COLUMN = len("// Thread safety: ")


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def opening(path: pathlib.Path) -> list[str]:
    """The lines above `#pragma once`."""
    lines = path.read_text().splitlines()
    assert "#pragma once" in lines, "the header has no #pragma once"
    return lines[: lines.index("#pragma once")]


def contract(path: pathlib.Path) -> list[str]:
    """The lines from the first entry to the empty line, or the end of the comment, behind the last one."""
    lines = opening(path)
    first = next((number for number, line in enumerate(lines) if ENTRY.match(line)), len(lines))
    return lines[first : lines.index("//", first) if "//" in lines[first:] else len(lines)]


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_a_header_opens_with_what_it_is(path):
    lines = opening(path)
    assert lines[0].startswith("// ")
    subject = re.match(r"// (\w+(?:\.h)?): \S", lines[0])
    is_sentence = re.match(r"// [A-Z]\w* \w+", lines[0])
    assert subject or is_sentence, f"neither 'Name: what it is' nor a sentence: {lines[0]}"
    assert [line for line in lines if not line.startswith("//")] == []
    first_entry = next((number for number, line in enumerate(lines) if ENTRY.match(line)), len(lines))
    assert [line for line in lines[:first_entry] if not re.match(r"//$|// \S", line)] == []


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_a_header_says_who_owns_what_and_which_threads_may_call_it(path):
    names = [match["name"] for line in opening(path) if (match := ENTRY.match(line))]
    assert names[:2] == ["Ownership", "Thread safety"]
    assert names == sorted(names, key=ENTRIES.index), "the entries are in another order"
    assert len(set(names)) == len(names), "an entry stands twice"


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_a_contract_is_laid_out_in_columns(path):
    """A line break that an editor or a formatter put into an entry leaves its rest outside of the text's column."""
    continuation = re.compile(r"//" + " " * (TEXT_COLUMN - 2) + r"\S")
    for line in contract(path):
        entry = ENTRY.match(line)
        if entry:
            assert entry.start("text") == TEXT_COLUMN, f"the text begins in another column: {line}"
        else:
            assert continuation.match(line), f"this line continues no entry: {line}"


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_all_entries_stand_together(path):
    outside = [line for line in opening(path) if ENTRY.match(line) and line not in contract(path)]
    assert outside == []


@pytest.mark.parametrize("path", CPP_FILES, ids=name_of)
def test_no_line_is_longer_than_a_page_is_wide(path):
    numbered = enumerate(path.read_text().splitlines(), start=1)
    assert [number for number, line in numbered if len(line) > MAX_COLUMNS] == []
