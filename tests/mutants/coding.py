"""The scenarios of the waits of coded copies, R15: on the simulated device, where one that is missing is a race."""

import torch
from scenario import Stage, race, scenario

PIECES = 5  # more than there are lanes


@scenario(
    "EncodeWaitsForStaging",
    wrong=race("copy out reads buffer @ offload_stream[0]", "encoding writes buffer @ encode_stream[0]"),
)
@scenario(
    "OffloadWaitsForEncode",
    wrong=race("encoding writes buffer @ encode_stream[0]", "copy out reads buffer @ offload_stream[0]"),
)
@scenario(
    "ReloadWaitsForStaging",
    wrong=race("decoding reads buffer @ decode_stream[0]", "copy in writes buffer @ reload_stream[0]"),
)
@scenario(
    "DecodeWaitsForReload",
    wrong=race("copy in writes buffer @ reload_stream[0]", "decoding reads buffer @ decode_stream[0]"),
)
def a_coded_record_goes_and_comes(stage: Stage) -> None:
    x = torch.linspace(1, 2, 256 * PIECES).requires_grad_()
    with stage.context(compress=True):
        y = x.sin().exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())
