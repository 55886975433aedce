"""test_try_docs.py: which commands `make try-docs` finds on the pages, and what it takes for the same print."""

import importlib

import pytest

from places import ROOT


@pytest.fixture
def try_docs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("try_docs")


def test_each_example_that_takes_no_gpu_is_run_with_what_it_printed(try_docs):
    found = try_docs.examples()
    run = {try_docs.script_of(command) for command, _ in found}
    scripts = {path.name for path in (ROOT / "examples").glob("[a-z]*.py")}
    assert run == scripts
    assert len(found) == len(run)
    assert set(try_docs.NEEDS) < scripts
    gpt = next(shown for command, shown in found if "train_gpt.py" in command)
    assert "1,684,736 values" in gpt
    assert all("NVIDIA" not in shown and "```" not in shown for _, shown in found)


def test_the_readme_and_the_quick_start_have_a_program_and_its_report(try_docs):
    (readme, of_fit, plan), (quick_start, of_context, counts) = try_docs.programs()
    assert (readme, quick_start) == ("README.md", "docs/quick-start.md")
    assert "torchoffload.fit(" in of_fit
    assert plan.startswith("torchoffload.fit: Sequential, 16 blocks, within ")
    assert "torchoffload.OffloadActivations" in of_context
    assert counts.startswith("torchoffload, since the last reset_stats():\n  offloaded ")


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("plain            2175 ms       284 MiB   identical", "plain            98 ms       291 MiB   identical"),
        ("step 1: loss 0.625783", "step 1: loss 0.625774"),
        ("   3      5.890734        5.890734     162 MiB", "   3      5.890735        5.890735     162 MiB"),
        ("step time   695 ms    1007 ms, 145% of plain", "step time   12 ms    14 ms, 117% of plain"),
        ("  waits            3 for a full offload window", "  waits            0 for a full offload window"),
        ("3 steps on CPU, 2 threads; memory", "3 steps on CPU, 64 threads; memory"),
    ],
)
def test_times_and_what_a_process_holds_besides_may_differ(try_docs, shown, printed):
    assert try_docs.alike(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("plain            2175 ms       284 MiB   identical", "plain            2175 ms       284 MiB   NOT THE SAME"),
        ("plain            2175 ms       284 MiB   identical", "plain            2175 ms       150 MiB   identical"),
        ("both             2011 ms        24 MiB", "offloaded        2011 ms        24 MiB"),
        ("step 1: loss 0.625783", "step 1: loss 0.635783"),
        ("  offloaded                536.0 MiB in 134 records", "  offloaded                536.0 MiB in 133 records"),
        ("4 steps on CPU, 2 threads", "400 steps on CPU, 2 threads"),
    ],
)
def test_other_words_bytes_and_losses_are_told(try_docs, shown, printed):
    assert not try_docs.alike(shown, printed)


def test_more_may_be_printed_but_not_less_nor_in_another_order(try_docs):
    assert try_docs.not_printed("a\nb\n", "first\na\nmore\nb\nlast\n") == []
    assert try_docs.not_printed("a\nb\n", "a\n") == ["b"]
    assert try_docs.not_printed("a\nb\n", "b\na\n") == ["b"]
