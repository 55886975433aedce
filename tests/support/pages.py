"""pages.py: the documents: the tests that they name, the links in them, and the tables."""

import re
from functools import cache
from pathlib import Path

from places import DOCS, ROOT, TESTS


def cases_in(file: str) -> set[str]:
    """The tests of a file, named from tests/; none where it does not exist."""
    path = TESTS / file
    return set(re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)) if path.exists() else set()


def named_tests(page: str) -> list[tuple[str | None, str]]:
    """(file, test) for each test that docs/`page` names: it belongs to the link before it."""
    named, file = [], None
    text = (DOCS / page).read_text()
    for link, test in re.findall(r"\(\.\./tests/((?:\w+/)*test_\w+\.py)\)|`(test_\w+)`", text):
        file = link or file
        if test:
            named.append((file, test))
    return named


def missing_tests(page: str) -> list[tuple[str | None, str]]:
    """Those of them that do not exist."""
    return [(file, test) for file, test in named_tests(page) if file is None or test not in cases_in(file)]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub, and the site, give the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


def broken_links(page: Path) -> list[str]:
    """Links of a page of this repository to files, or to headings of pages, that are not there."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    broken = set()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        is_there = target.exists() and target.resolve().is_relative_to(ROOT)
        if not is_there or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.add(link)
    return sorted(broken)


def tables(page: str, heading: str) -> list[list[str]]:
    """The cells of the rows below `heading`, up to the next heading."""
    text = (DOCS / page).read_text()
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]
