"""test_reasons.py: the core's reasons for keeping, beside what report() says of them and what the documents say."""

import re

import pytest

import torchoffload
from places import ROOT
from torchoffload._observe.reasons import REASONS

LISTED = re.findall(
    r'^TORCHOFFLOAD_REASON\(\w+, "(\w+)"\)', (ROOT / "csrc/core/reasons.def").read_text(), flags=re.MULTILINE
)


def rows_of(table: str, document: str) -> list[str]:
    """The first cells of a Markdown table, without backticks, by the title of its first column."""
    text = (ROOT / document).read_text()
    rows = re.search(rf"^\| {table} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert rows is not None, f"{document} has no table of {table}"
    return re.findall(r"^\| `(\w+)`", rows[1], flags=re.MULTILINE)


def test_there_are_reasons_and_none_twice():
    assert len(LISTED) > 10
    assert len(set(LISTED)) == len(LISTED)


def test_every_reason_is_told_in_words():
    assert list(REASONS) == LISTED


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_has_a_meaning_and_full_sentences_of_advice(name):
    reason = REASONS[name]
    assert reason.meaning
    assert not reason.meaning.endswith(".")
    assert re.fullmatch(r"[A-Z].*\.", reason.advice)


def test_every_reason_has_its_row_in_the_documents():
    assert sorted(rows_of("reason for keeping", "docs/api.md")) == sorted(LISTED)


def test_every_reason_is_named_where_its_counts_are_documented():
    documented = re.search(
        r"records_kept, bytes_kept : .*?\n(.*?)\n    bytes_away", torchoffload.TapeStats.__doc__, re.DOTALL
    )
    assert documented is not None
    assert re.findall(r"``(\w+)``", documented[1]) == LISTED
