"""test_contracts.py: each header opens with its contract: what it is, who owns what, and which threads may call it."""

import pathlib
import re

import pytest

from places import ROOT

CSRC = ROOT / "csrc"
HEADERS = sorted(CSRC.rglob("*.h"))

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


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def opening(path: pathlib.Path) -> list[str]:
    """The lines above `#pragma once`."""
    lines = path.read_text().splitlines()
    assert "#pragma once" in lines, "the header has no #pragma once"
    return lines[: lines.index("#pragma once")]


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_a_header_opens_with_what_it_is(path):
    lines = opening(path)
    assert lines[0].startswith("// ")
    subject = re.match(r"// (\w+(?:\.h)?): \S", lines[0])
    is_sentence = re.match(r"// [A-Z]\w* \w+", lines[0])
    assert subject or is_sentence, f"neither 'Name: what it is' nor a sentence: {lines[0]}"


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_a_header_says_who_owns_what_and_which_threads_may_call_it(path):
    names = [match["name"] for line in opening(path) if (match := ENTRY.match(line))]
    assert names[:2] == ["Ownership", "Thread safety"]
    assert names == sorted(names, key=ENTRIES.index), "the entries are in another order"
    assert len(set(names)) == len(names), "an entry stands twice"
