"""The bytes that come for good after a survey, as the state of an optimizer."""

from collections.abc import Iterator

import pytest
import torch

from torchoffload._fit.model.growth import Growth


class Gradients:
    """The gradients that a model has, and how often all of them were looked at."""

    def __init__(self) -> None:
        self.nbytes, self.counted = 0, 0

    def __call__(self) -> Iterator[torch.Tensor]:
        if self.nbytes:
            yield torch.empty(self.nbytes, dtype=torch.uint8)
        self.counted += 1


def test_gradients_are_no_growth_and_are_counted_only_if_more_is_left_than_ever():
    gradients = Gradients()
    growth = Growth(gradients)
    growth.begin(1000)
    assert growth.bytes_after(1000, 10_000) == 0
    assert gradients.counted == 0
    gradients.nbytes = 500
    assert [growth.bytes_after(1500, 10_000) for _ in range(3)] == [0, 0, 0]
    assert gradients.counted == 1
    gradients.nbytes = 0
    assert growth.bytes_after(3000, 10_000) == 2000
    counted = gradients.counted
    assert growth.bytes_after(1000, 10_000) == 2000  # until a plan is made beside them
    assert growth.bytes_after(3000, 10_000) == 2000
    growth.take(2000)
    assert growth.bytes_after(3000, 10_000) == 0
    assert gradients.counted == counted


def test_a_state_of_as_many_bytes_as_the_gradients_is_seen_once_they_are_gone():
    """As that of SGD with momentum: with it as much is left as before with gradients."""
    gradients = Gradients()
    growth = Growth(gradients)
    growth.begin(1000)
    gradients.nbytes = 500
    assert growth.bytes_after(1500, 10_000) == 0
    gradients.nbytes = 0
    assert growth.bytes_after(1500, 10_000) == 500


def test_where_the_memory_cannot_be_asked_for_nothing_grows():
    growth = Growth(Gradients())
    growth.begin(-500)  # gradients are known, and the bytes that are allocated are not
    assert growth.bytes_after(0, 10_000) == 0


@pytest.mark.parametrize("memory_bytes", [10_000, 1_000])
def test_less_than_a_hundredth_of_the_memory_is_no_growth(memory_bytes: int):
    growth = Growth(Gradients())
    growth.begin(1000)
    assert growth.bytes_after(1100, memory_bytes) == (100 if memory_bytes == 1_000 else 0)
    assert growth.grown_bytes == 100  # which a plan for another memory counts
    assert growth.bytes_after(1201, memory_bytes) == 201
    growth.begin(1201)
    assert growth.bytes_after(1201, memory_bytes) == growth.grown_bytes == 0
