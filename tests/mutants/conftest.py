"""conftest.py of the mutants: the line that counts them."""

import re

import pytest

_caught: dict[str, bool] = {}  # by the mutant's name


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = re.search(r"::test_mutant\[(\w+)\]$", report.nodeid)
    if found:
        _caught[found[1]] = _caught.get(found[1], True) and report.passed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    survivors = [name for name, caught in _caught.items() if not caught]
    line = f"{len(_caught)} mutants, {len(_caught) - len(survivors)} caught"
    if survivors:
        line += "; not caught: " + ", ".join(survivors)
    terminalreporter.section("mutants")
    terminalreporter.line(line, red=bool(survivors), green=not survivors)
