"""docs/compatibility.md says what each case does, and names the test that shows it: each must exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "compatibility.md").read_text()
COMPILE_FILES = ("test_compile.py", "test_compile_buffers.py", "test_compile_graphs.py", "test_compile_options.py")


def cases_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (TESTS / file).read_text(), flags=re.MULTILINE))


def named_tests() -> list[tuple[str, str]]:
    """(file, test): a test belongs to the link before it on its line, or on the line above."""
    named, file = [], None
    for link, test in re.findall(r"\(\.\./tests/(test_\w+\.py)\)|`(test_\w+)`", PAGE):
        file = link or file
        if test:
            named.append((file, test))
    return named


def test_each_test_that_the_page_names_exists():
    missing = [(file, test) for file, test in named_tests() if test not in cases_in(file)]
    assert not missing
    assert len(named_tests()) > 100


@pytest.mark.parametrize("file", COMPILE_FILES)
def test_each_case_of_torch_compile_has_a_row(file: str):
    assert cases_in(file) - {test for _, test in named_tests()} == set()
