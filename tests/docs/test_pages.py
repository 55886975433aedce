"""The documents as a whole: links and the headings that they lead to, the tree of the site, and the version named."""

import re
from pathlib import Path

import pytest

import torchoffload
from pages import broken_links, missing_tests
from places import DOCS, ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), ROOT / "benchmarks" / "README.md"]
TREE = re.compile(r"^```\{toctree\}\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pages_below(page: str) -> list[str]:
    """The pages that the trees of a page of the site name."""
    path = DOCS / f"{page}.md"
    lines = "".join(TREE.findall(path.read_text())).splitlines() if path.exists() else []
    return [re.sub(r".*<(.*)>", r"\1", line) for line in lines if line and not line.startswith(":")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_link_leads_to_a_file_and_a_heading_that_are_there(page: Path):
    assert broken_links(page) == []


def test_each_page_of_the_site_is_in_its_tree_once():
    found = ["index"]
    for page in found:
        found += pages_below(page)
    assert sorted(found) == sorted(path.stem for path in (*DOCS.glob("*.md"), *DOCS.glob("*.rst")))


def test_each_public_name_is_in_the_reference_from_docstrings():
    text = (DOCS / "docstrings.rst").read_text()
    documented = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)$", text, flags=re.MULTILINE))
    assert documented == set(torchoffload.__all__) - {"__version__"}


def test_the_citation_is_of_this_version():
    assert f"\nversion: {torchoffload.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_each_test_that_a_page_names_stands_in_the_file_that_it_links_to_before(page: str):
    assert missing_tests(page) == []
