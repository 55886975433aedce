"""test_reasons.py: the core's reasons for keeping, beside what report() says of them and what the documents say."""

import re

import pytest

import torchoffload
from places import ROOT
from torchoffload._observe.reasons import REASONS

LISTED = re.findall(
    r'^TORCHOFFLOAD_REASON\(\w+, "(\w+)"\)', (ROOT / "csrc/core/reasons.def").read_text(), flags=re.MULTILINE
)


def documented() -> list[tuple[str, str]]:
    """Each reason of the table in docs/reasons.md, with what its row says to change."""
    text = (ROOT / "docs/reasons.md").read_text()
    return re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text, flags=re.MULTILINE)


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


def test_every_reason_has_its_row_in_the_documents_with_the_advice_of_the_report():
    assert documented() == [(name, reason.advice) for name, reason in REASONS.items()]


def test_every_reason_is_named_where_its_counts_are_documented():
    listed = re.search(
        r"records_kept, bytes_kept : .*?\n(.*?)\n    bytes_away", torchoffload.TapeStats.__doc__, re.DOTALL
    )
    assert listed is not None
    assert re.findall(r"``(\w+)``", listed[1]) == LISTED
