"""test_design_page.py: what docs/design.md says of the sources by name is there, and its text is wrapped."""

import re

import pytest

from places import DOCS, ROOT

PAGE = (DOCS / "design.md").read_text()
SOURCES = [path for folder in ("csrc", "src") for path in (ROOT / folder).rglob("*") if path.is_file()]
HEADERS = "".join(path.read_text() for path in SOURCES if path.suffix == ".h")
MAX_COLUMNS = 120


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, f"the page has no section: {title}"
    return found[1]


def verbs() -> list[str]:
    """The functions that the first cells of the table name, with their classes where the table names these."""
    cells = re.findall(r"^\| (`.*?`) \|", section("The verbs of release"), flags=re.MULTILINE)
    return [verb for cell in cells for verb in re.findall(r"`([\w:]+)(?:\([^`]*\))?`", cell)]


def files_on_the_way() -> list[str]:
    drawing = "\n".join(re.findall(r"^    .*", section("One saved tensor's way"), flags=re.MULTILINE))
    return sorted(set(re.findall(r"(?<![\w*])[\w/]+\.(?:cpp|h|py)\b", drawing)))


def test_the_table_of_verbs_and_the_drawing_are_found():
    assert len(verbs()) > 20
    assert len(files_on_the_way()) > 15


@pytest.mark.parametrize("verb", verbs())
def test_each_verb_is_a_function(verb):
    owner, _, name = verb.rpartition("::")
    assert re.search(rf"\b{name}\(", HEADERS), f"no header declares {name}()"
    assert not owner or re.search(rf"\b(?:class|struct) {owner}\b", HEADERS), f"no header has {owner}"


@pytest.mark.parametrize("file", files_on_the_way())
def test_each_file_on_the_way_exists(file):
    assert [path for path in SOURCES if f"/{path.relative_to(ROOT)}".endswith(f"/{file}")] != []


def test_the_text_is_wrapped():
    """Rows of tables cannot be."""
    numbered = enumerate(PAGE.splitlines(), start=1)
    too_long = [number for number, line in numbered if len(line) > MAX_COLUMNS and not line.startswith("|")]
    assert too_long == []
