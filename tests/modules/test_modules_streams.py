"""only_inputs where a module is called on another stream than the one that fills its input."""

import pytest
from torch import nn

from devices import Device
from gradients import Run, assert_same_gradients
from module_models import INPUT_BYTES, TOKENS, WIDTH, offload


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")
def test_what_another_stream_fills_stays_when_it_becomes_an_input(device_under_test: Device):
    """Its copy would wait for the stream that the module is called on, before that waits for the other."""

    def program(run: Run):
        main, side = run.simulation.current_stream(), run.simulation.new_stream()

        class Waits(nn.Linear):
            def forward(self, x):
                side.wait_stream(main)
                return super().forward(x).relu()

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = Waits(WIDTH, WIDTH)

            def forward(self, x):
                hidden = x.tanh()
                with run.simulation.stream(side):
                    out = self.layer(hidden)
                main.wait_stream(side)
                return out.sum()

        model, x = run.module(Model), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, "layer", only_inputs=True)
        model(x).backward()
        return model, x.grad

    stats = assert_same_gradients(
        program, device=device_under_test, moved_bytes=INPUT_BYTES, kept_reason="not_an_input"
    )
    assert stats.bytes_deduplicated == 0  # the layer's own save moves, and not the one of tanh
