"""pages.py: the documents that name tests, and whether those tests exist."""

import re

from places import DOCS, TESTS


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


def broken_links(page: str) -> list[str]:
    """Links of docs/`page` to files of this repository that are not there."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (DOCS / page).read_text())
    return sorted({link for link in links if not (DOCS / link).exists()})


def tables(page: str, heading: str) -> list[list[str]]:
    """The cells of the rows below `heading`, up to the next heading."""
    text = (DOCS / page).read_text()
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]
