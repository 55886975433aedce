"""The scenarios of values that compiled graphs save, R17: their memory is used again behind `release`."""

import torch
from scenario import AMPLE_BYTES, Stage, race, scenario

pack, release, unpack = (getattr(torch.ops.torchoffload, name) for name in ("pack", "release", "unpack"))


def unpacked(token: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = unpack(token, like.device, like.dtype)
    return value


@scenario(
    "ReleasedSourceWaitsForOffload",
    wrong=race("copy out reads source @ offload_stream[0]", "something fills source @ compute_stream[0]"),
)
def a_graph_uses_the_memory_of_a_value_that_moves_again(stage: Stage) -> None:
    x = stage.leaf().detach()
    expected = x.clone()
    with stage.context(offload_window_bytes=AMPLE_BYTES):
        token = release(pack(x, 0), x, None)
        stage.simulation.fill(x, stage.main)
        x.zero_()
    assert torch.equal(unpacked(token, x), expected)


@scenario("KeptSourceCopied", wrong="the value is another one")
def a_graph_uses_the_memory_of_a_value_that_stays_again(stage: Stage) -> str | None:
    x = stage.leaf().detach()
    expected = x.clone()
    token = release(pack(x, 0), x, None)
    x.zero_()
    return None if torch.equal(unpacked(token, x), expected) else "the value is another one"


@scenario("RetainedValueCopied", wrong="the second backward gets another value")
def a_backward_that_retains_its_graph_writes_into_what_it_got(stage: Stage) -> str | None:
    x = stage.leaf().detach()
    with stage.context():
        token = release(pack(x, 0), x, None)
    first = unpacked(token, x)
    first.zero_()
    return None if torch.equal(unpacked(token, x), x) else "the second backward gets another value"
