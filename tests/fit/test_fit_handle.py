"""The handle of fit: its errors, its report, its files, and what it leaves behind."""

import copy
import gc
import json
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from planned_blocks import BLOCKS, WIDTH

pytestmark = pytest.mark.devices("disk")


def settled(model: nn.Module, device: Device, memory: Any = "1GiB", steps: int = 16, **more: Any) -> Any:
    handle = torchoffload.fit(model, memory, **(options_of(device) | more))
    for _ in range(steps):
        model(torch.randn(4, 8, WIDTH)).backward()
    return handle


def weights_of(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


def test_with_room_for_all_nothing_is_installed_on_the_blocks(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test) as handle:
        assert handle.plan.moved_bytes == handle.plan.recompute_s == 0
        torchoffload.reset_stats()
        model(torch.randn(4, 8, WIDTH)).backward()
        assert torchoffload.stats().bytes_offloaded == 0


def test_too_little_memory_is_an_error_that_says_how_much_would_do(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    handle = torchoffload.fit(model, weights_of(model), **options_of(device_under_test))
    for _ in range(2):
        model(torch.randn(4, 8, WIDTH)).backward()
    told = r"^fit: out of memory\. [\d.]+ KiB is too little. This step needs at least .* Give\s+memory=\"([\d.]+KiB)\""
    with pytest.raises(torch.OutOfMemoryError, match=told) as raised:
        model(torch.randn(4, 8, WIDTH))
    assert handle.phase == "least memory"
    model(torch.randn(4, 8, WIDTH)).backward()
    assert handle.plan is not None
    handle.replan(re.match(told, str(raised.value))[1])
    model(torch.randn(4, 8, WIDTH)).backward()
    assert handle.phase != "least memory"
    handle.remove()


def test_too_little_memory_may_be_a_warning(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with pytest.warns(UserWarning, match="It runs in the least memory"):
        handle = settled(model, device_under_test, "1KiB", on_unfit="warn")
    assert handle.phase == "least memory"
    assert handle.plan.moved_bytes > 0
    handle.remove()


def test_a_report_tells_why_operators_take_longer(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchoffload._fit.model.fitted_model.obstacle", lambda: "this torch is another one")
    with settled(Model(BLOCKS["transformer"]), device_under_test, steps=6) as handle:
        report = " ".join(handle.report().split())
    assert report.count("by way of Python, so that each takes longer: this torch is another one") == 1


def test_less_memory_takes_less(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test) as handle:
        points = handle.frontier()
        assert [p.memory_bytes for p in points] == sorted(p.memory_bytes for p in points)
        assert [p.step_s for p in points] == sorted((p.step_s for p in points), reverse=True)
        handle.replan(int(points[0].memory_bytes / 0.96) + 1)
        for _ in range(16):
            model(torch.randn(4, 8, WIDTH)).backward()
        assert handle.phase == "settled"
        assert handle.plan.predicted_peak_bytes <= points[0].memory_bytes
        assert handle.plan.moved_bytes + handle.plan.recompute_s > 0
        for part in ("What the blocks do:", "net.blocks.0", "One more GiB would save", "Plans that were tried"):
            assert part in handle.report(), handle.report()


def test_before_the_survey_is_done(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with torchoffload.fit(model, "1GiB", **options_of(device_under_test)) as handle:
        assert handle.plan is None
        assert "no plan yet" in handle.report()
        with pytest.raises(RuntimeError, match="survey is not done"):
            handle.frontier()
        with pytest.raises(RuntimeError, match="no plan has been chosen: it takes some"):
            handle.save("plan.json")


def test_remove_takes_all_hooks_away(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    handle = settled(model, device_under_test, steps=1)
    loss = model(torch.randn(4, 8, WIDTH))
    handle.remove()
    handle.remove()
    loss.backward()
    assert handle.phase == "removed"
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    with settled(model, device_under_test) as again:
        assert again.phase == "settled"
    with pytest.raises(RuntimeError, match="was removed"):
        handle.replan("1GiB")


@pytest.mark.parametrize("steps", [0, 1, 4, 16])
@pytest.mark.parametrize("removes", [True, False])
def test_a_handle_says_what_it_knows_when_all_is_over(device_under_test: Device, steps: int, removes: bool):
    """After remove(), and when the model is gone: the handle tells of the plan, or says why there is none."""
    model = Model(BLOCKS["transformer"])
    handle = settled(model, device_under_test, steps=steps)
    if removes:
        handle.remove()
    else:
        del model
        gc.collect()
    why = "was removed" if removes else "does not exist any more"
    path = device_under_test.directory / "plan.json"
    assert "Model" in repr(handle)
    assert "6 blocks" in repr(handle)
    if steps == 16:
        assert "net.blocks.0" in handle.report()
        assert handle.plan.predicted_peak_bytes > 0
        handle.save(path)
        with torchoffload.fit(Model(BLOCKS["transformer"]), plan=path, **options_of(device_under_test)) as again:
            assert again.phase == "settled"
    else:
        assert why in handle.report()
        assert handle.plan is None
        with pytest.raises(RuntimeError, match=why):
            handle.save(path)
    if steps > 3:
        assert len(handle.frontier()) > 1
    else:
        for ask in (handle.frontier, lambda: handle.plot_frontier(path)):
            with pytest.raises(RuntimeError, match=why):
                ask()
    with pytest.raises(RuntimeError, match=why):
        handle.replan("1GiB")
    handle.remove()
    handle.remove()
    assert handle.phase == "removed"


def test_a_handle_says_that_the_environment_turned_it_off(
    device_under_test: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    handle = settled(Model(BLOCKS["transformer"]), device_under_test, steps=3)
    assert "TORCHOFFLOAD_DISABLE=1 was set in the environment when it was called" in handle.report()
    assert handle.phase == "removed"
    for use in (
        handle.frontier,
        lambda: handle.save(tmp_path / "plan.json"),
        lambda: handle.replan("2GiB"),
        lambda: handle.plot_frontier(tmp_path / "frontier.png"),
    ):
        with pytest.raises(RuntimeError, match=r"TORCHOFFLOAD_DISABLE=1 was set .* call torchoffload\.fit\(\) again"):
            use()
    handle.remove()
    assert "TORCHOFFLOAD_DISABLE=1" in handle.report()


def test_a_model_that_has_lost_a_block_is_planned_for_anew_in_its_next_step(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test) as handle:
        count = len(handle._driver.names)
        del model.net.blocks[2]
        gc.collect()
        assert "net.blocks.2" in handle.report() or "net.blocks.0 to" in handle.report()
        handle.replan("1GiB")
        for _ in range(16):
            model(torch.randn(4, 8, WIDTH)).backward()
        assert handle.phase == "settled"
        assert f"{count - 1} blocks" in handle.report()
        assert "blocks were replaced or deleted (net.blocks.2)" in handle.report()
        assert "within 1.0 GiB" in handle.report()


@pytest.mark.parametrize("steps", [0, 1, 16])
def test_a_second_fit_of_a_model_replaces_the_first(device_under_test: Device, steps: int):
    model = Model(BLOCKS["transformer"])
    first = settled(model, device_under_test, steps=steps)
    loss = model(torch.randn(4, 8, WIDTH))
    with settled(model, device_under_test, "2GiB", steps=0) as second:
        loss.backward()
        assert (first.phase, second.phase) == ("removed", "survey")
        first.remove()  # takes nothing of the second one away
        for _ in range(16):
            model(torch.randn(4, 8, WIDTH)).backward()
        assert second.phase == "settled"
        assert "shared by" not in second.report()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_copy_is_an_ordinary_model(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test, steps=3):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torchoffload.reset_stats()
            copied(torch.randn(4, 8, WIDTH)).backward()
            assert torchoffload.stats().bytes_offloaded == 0


def test_a_saved_plan_is_followed_at_once(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    path = device_under_test.directory / "plan.json"
    with settled(model, device_under_test) as handle:
        handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)
        for _ in range(16):
            model(torch.randn(4, 8, WIDTH)).backward()
        handle.save(path)
        plan = handle.plan
    other = Model(BLOCKS["transformer"])
    with torchoffload.fit(other, plan=path, **options_of(device_under_test)) as handle:
        assert handle.phase == "settled"
        assert handle.plan == plan
        for _ in range(3):
            other(torch.randn(4, 8, WIDTH)).backward()
        assert handle.phase == "settled"
        assert "other operators than planned" not in handle.report()
    with pytest.raises(ValueError, match="which this model does not have"):
        torchoffload.fit(Model(BLOCKS["transformer"], depth=2), plan=path, **options_of(device_under_test))
    path.write_text(json.dumps({"format": "another"}))
    with pytest.raises(ValueError, match=r"no file that Fitted\.save"):
        torchoffload.fit(other, plan=path, **options_of(device_under_test))


def test_a_picture_of_the_frontier(device_under_test: Device):
    pytest.importorskip("matplotlib")
    model = Model(BLOCKS["transformer"])
    path = device_under_test.directory / "frontier.png"
    with settled(model, device_under_test) as handle:
        handle.plot_frontier(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_blocks_can_be_chosen(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test, blocks="net.blocks.[12]") as handle:
        assert "2 blocks" in repr(handle)
        assert "net.blocks.1 to net.blocks.2" in handle.report()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"memory": "much"}, ValueError), ({"memory": 1.5}, ValueError), ({"memory": -1}, ValueError),
        ({"memory": 0}, ValueError), ({"memory": "0GiB"}, ValueError), ({"memory": float("nan")}, ValueError),
        ({"memory": float("inf")}, ValueError), ({"memory": 0.0}, ValueError), ({"memory": "40 G"}, ValueError),
        ({"memory": 1.0}, ValueError),  # what a CPU has cannot be asked for
        ({"memory": "1GiB", "margin": float("nan")}, ValueError),
        ({"memory": True}, TypeError), ({"memory": [1]}, TypeError), ({"memory": None}, ValueError),
        ({"memory": "1GiB", "margin": 0.6}, ValueError), ({"memory": "1GiB", "margin": "a"}, TypeError),
        ({"memory": "1GiB", "recompute": 1}, TypeError), ({"memory": "1GiB", "on_unfit": "ignore"}, ValueError),
        ({"memory": "1GiB", "blocks": "none.such"}, ValueError), ({"memory": "1GiB", "unknown": 1}, TypeError),
        ({"memory": "1GiB", "offload_window_bytes": 1}, TypeError), ({"memory": "1GiB", "plan": "absent"}, OSError),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(device_under_test: Device, arguments: dict[str, Any], error: type[Exception]):
    model = Model(BLOCKS["transformer"])
    with pytest.raises(error):
        torchoffload.fit(model, **(options_of(device_under_test) | arguments))
    with torchoffload.fit(model, "1GiB", **options_of(device_under_test)):
        pass  # nothing was left behind


def test_a_plan_that_cannot_be_followed_leaves_nothing_behind(device_under_test: Device):
    path = device_under_test.directory / "plan.json"
    large = Model(BLOCKS["transformer"])
    with settled(large, device_under_test) as handle:
        handle.save(path)
    model = Model(BLOCKS["transformer"], depth=2)
    with pytest.raises(ValueError, match="which this model does not have"):
        torchoffload.fit(model, plan=path, **options_of(device_under_test))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_saved_plan_is_not_followed_where_other_things_are_asked(device_under_test: Device):
    model, path = Model(BLOCKS["transformer"]), device_under_test.directory / "plan.json"
    with settled(model, device_under_test) as handle:
        handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)
        for _ in range(16):
            model(torch.randn(4, 8, WIDTH)).backward()
        assert handle.plan.recompute_s > 0
        handle.save(path)
    options = options_of(device_under_test)
    with torchoffload.fit(model, "1GiB", plan=path, **options) as handle:
        for _ in range(12):
            model(torch.randn(4, 8, WIDTH)).backward()
        assert handle.plan.recompute_s == 0
    with pytest.raises(torch.OutOfMemoryError, match="is too little"):
        torchoffload.fit(model, weights_of(model), plan=path, **options)
    with torchoffload.fit(model, "10MiB", plan=path, recompute=False, **options) as handle:
        for _ in range(12):
            model(torch.randn(4, 8, WIDTH)).backward()
        assert handle.plan.recompute_s == 0


def test_a_model_that_is_dropped_is_freed(device_under_test: Device):
    for steps in (0, 1, 16):
        model = Model(BLOCKS["transformer"])
        handle = settled(model, device_under_test, steps=steps)  # it holds none of the model
        gone = weakref.ref(model.net.blocks[0])
        del model
        gc.collect()
        assert gone() is None
        handle.remove()


def test_steps_without_a_backward_hold_nothing_and_calls_past_the_model_are_steps(device_under_test: Device):
    """The survey goes on once there are training steps."""
    model = Model(BLOCKS["transformer"])
    with torchoffload.fit(model, "1GiB", **options_of(device_under_test)) as handle:
        for _ in range(100):
            model(torch.randn(4, 8, WIDTH))
        assert handle.phase == "survey"
        for _ in range(16):
            model.forward(torch.randn(4, 8, WIDTH)).backward()
        assert handle.phase == "settled"


def test_blocks_belong_to_one_fit(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    options = options_of(device_under_test) | {"move": False}
    with torchoffload.fit(model.net, "1GiB", **options), pytest.raises(ValueError, match="of another model"):
        torchoffload.fit(model, "1GiB", **options)


def test_inside_of_transforms_and_traces_blocks_are_called_as_they_are(device_under_test: Device):
    model, x = Model(BLOCKS["in place"]), torch.randn(4, 8, WIDTH)
    expected = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    with torchoffload.fit(model, "1GiB", **options_of(device_under_test)):
        found = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        torch.func.grad(model)(x)
        with forward_ad.dual_level():
            model(forward_ad.make_dual(x, torch.ones_like(x)))
        torch.jit.trace(model, (x,))
    assert torch.equal(expected[1], found[1])
