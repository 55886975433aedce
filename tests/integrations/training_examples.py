"""training_examples.py: what the examples of trainers are run with, and what they have to print."""

import re

SMALL = ["--steps", "3", "--layers", "2", "--tokens", "512", "--batch", "8"]


def assert_same_and_moved(text: str, steps: int) -> None:
    assert re.search(r"losses and \d+ parameters: identical", text), text
    moved = [int(count) for count in re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +(\d+) MiB$", text, flags=re.MULTILINE)]
    assert len(moved) == steps, text
    assert all(count > 0 for count in moved), text
