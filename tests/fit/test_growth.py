"""The bytes that come for good after a survey, as the state of an optimizer."""

from torchoffload._fit.model.growth import Growth


def test_gradients_are_no_growth_and_are_looked_at_only_if_more_is_left_than_ever():
    asked: list[int] = []
    gradient_bytes = 0

    def gradients() -> int:
        asked.append(gradient_bytes)
        return gradient_bytes

    growth = Growth(gradients)
    growth.begin(1000)
    assert growth.bytes_after(1000, 10_000) == 0
    assert not asked
    gradient_bytes = 500
    assert [growth.bytes_after(1500, 10_000) for _ in range(3)] == [0, 0, 0]
    assert asked == [500]
    gradient_bytes = 0
    assert growth.bytes_after(3000, 10_000) == 2000
    assert growth.bytes_after(1000, 10_000) == 2000  # until a plan is made beside them
    growth.take(2000)
    assert growth.bytes_after(3000, 10_000) == 0
    assert len(asked) == 2


def test_where_the_memory_cannot_be_asked_for_nothing_grows():
    growth = Growth(lambda: 0)
    growth.begin(-500)  # gradients are known, and the bytes that are allocated are not
    assert growth.bytes_after(0, 10_000) == 0


def test_less_than_a_hundredth_of_the_memory_is_no_growth():
    growth = Growth(lambda: 0)
    growth.begin(1000)
    assert growth.bytes_after(1100, 10_000) == 0
    assert growth.grown_bytes == 100  # which a plan for another memory counts
    assert growth.bytes_after(1201, 10_000) == 201
    growth.begin(1201)
    assert growth.bytes_after(1201, 10_000) == growth.grown_bytes == 0
