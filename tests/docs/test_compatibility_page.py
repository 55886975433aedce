"""docs/compatibility.md says what each case does, and names the test that shows it: each must exist."""

import pytest

from pages import cases_in, missing_tests, named_tests

PAGE = "compatibility.md"
COMPILE_FILES = ("test_compile.py", "test_compile_buffers.py", "test_compile_graphs.py", "test_compile_options.py")


def test_each_test_that_the_page_names_exists():
    assert missing_tests(PAGE) == []
    assert len(named_tests(PAGE)) > 100


@pytest.mark.parametrize("file", COMPILE_FILES)
def test_each_case_of_torch_compile_has_a_row(file: str):
    assert cases_in(file) - {test for _, test in named_tests(PAGE)} == set()
