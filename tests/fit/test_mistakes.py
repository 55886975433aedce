"""Mistakes with fit: each is told at once, and the text says what to write instead."""

import dataclasses
import gc
import importlib.util
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from planned_blocks import BLOCKS, WIDTH
from torchoffload._contexts.amounts import amount_text, parse_amount
from torchoffload._fit.model.describe import describe
from torchoffload._fit.plan.step import StepPlan, least_plan, plan_step
from torchoffload._fit.plan.trials import Trial, does_not_fit

pytestmark = pytest.mark.devices("disk")


def make_model(depth: int = 4) -> nn.Module:
    return Model(BLOCKS["transformer"], depth)


def train(model: nn.Module, steps: int, batch: int = 4) -> None:
    for _ in range(steps):
        model(torch.randn(batch, 8, WIDTH)).backward()


def weights_of(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


# ---- amounts of memory ----


@pytest.mark.parametrize(("memory", "wanted"), [(40, "40GiB"), ("40", "40GiB"), (1, "1GiB"), (8192, "8192MiB")])
@pytest.mark.parametrize("on_unfit", ["error", "warn"])
def test_a_number_that_lacks_its_unit_is_refused_at_the_call(
    device_under_test: Device, memory: Any, wanted: str, on_unfit: Any
):
    told = rf'^memory={memory!r} means {memory} bytes, and the weights of Model take .*KiB; did you mean "{wanted}"'
    with pytest.raises(ValueError, match=told):
        torchoffload.fit(make_model(), memory, on_unfit=on_unfit, **options_of(device_under_test))


def test_less_than_the_weights_is_refused_at_the_call(device_under_test: Device):
    model, options = make_model(), options_of(device_under_test)
    with pytest.raises(ValueError, match=r"^memory='1KiB' is less than the weights of Model take by themselves, .*KiB"):
        torchoffload.fit(model, "1KiB", **options)
    with torchoffload.fit(model, weights_of(model), **options) as handle:
        with pytest.raises(ValueError, match=r"^memory='1KiB' is less than the weights"):
            handle.replan("1KiB")
        with pytest.raises(ValueError, match=r'^memory=7 means 7 bytes, .* did you mean "7GiB"\?$'):
            handle.replan(7)
    with torchoffload.fit(model, "1KiB", on_unfit="warn", **options) as handle:
        assert handle.phase == "survey"


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        ("40G", r"^memory='40G' has an unknown unit, 'G': write \"40GiB\"$"),
        ("40 g", r"^memory='40 g' has an unknown unit, 'g': write \"40GiB\"$"),
        ("512M", r"^memory='512M' has an unknown unit, 'M': write \"512MiB\"$"),
        ("40Gi", r"^memory='40Gi' has an unknown unit, 'Gi': write \"40GiB\"$"),
        ("1 potato", r"^memory='1 potato' has an unknown unit, 'potato': write one of \"KiB\", \"MiB\", \"GiB\""),
        ("80%", r"^memory='80%' is a percentage: write a fraction, memory=0\.8\. A CPU has no total .*\"8GiB\"$"),
        (40.0, r"^memory=40\.0 is above 1, and a float is a fraction .*: for GiB write memory=\"40GiB\"$"),
        (40e9, r"^memory=40000000000\.0 is above 1, .* for bytes write an int, memory=40000000000$"),
        (0.8, r"^memory must be given for a model on 'cpu': .*Give bytes, or a text such as memory=\"8GiB\""),
    ],
)
def test_an_amount_that_is_none_is_told_as_it_should_be_written(device_under_test: Device, memory: Any, told: str):
    with pytest.raises(ValueError, match=told):
        torchoffload.fit(make_model(), memory, **options_of(device_under_test))


@pytest.mark.parametrize("nbytes", [1, 1023, 1025, 8_912_896, 8_912_897, 1 << 30, (1 << 30) + 1, 123_456_789_012])
def test_an_amount_that_is_advised_is_one_that_suffices_and_no_more_than_a_tenth_more(nbytes: int):
    advised = parse_amount(amount_text(nbytes)).nbytes
    assert advised is not None
    assert nbytes <= advised <= max(1.1 * nbytes, nbytes + 103)


def test_the_memory_that_would_do_is_advised_in_a_unit_of_its_size(device_under_test: Device):
    model = make_model()
    with torchoffload.fit(model, weights_of(model), **options_of(device_under_test)) as handle:
        with pytest.raises(torch.OutOfMemoryError, match=r'Give memory="[\d.]+(Ki|Mi)B", a smaller batch') as raised:
            train(model, 5)
        advised = re.search(r'memory="([^"]+)"', str(raised.value))
        assert advised is not None
        handle.replan(advised[1])
        train(model, 16)
        assert handle.phase == "settled"


# ---- options ----


def test_fit_with_nothing_to_choose_is_refused(device_under_test: Device):
    with pytest.raises(ValueError, match=r"^recompute=False with move=False leaves fit nothing to choose: .*leave fit"):
        torchoffload.fit(make_model(), "1GiB", move=False, recompute=False)


def test_a_plan_file_that_is_not_there_is_told_with_the_way_to_get_one(device_under_test: Device, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"^there is no file plan='nope\.json'\. Leave plan out .* save\(\)"):
        torchoffload.fit(make_model(), plan="nope.json", **options_of(device_under_test))
    with pytest.raises(FileNotFoundError, match="there is no file plan="):
        torchoffload.fit(make_model(), plan=tmp_path, **options_of(device_under_test))
    with pytest.raises(TypeError, match=r"^plan must be the path of a file that Fitted\.save\(\) wrote, got 7"):
        torchoffload.fit(make_model(), plan=7, **options_of(device_under_test))


# ---- reports ----


def test_a_step_that_fits_as_it_is_needs_no_fit(device_under_test: Device):
    model = make_model()
    with torchoffload.fit(model, "1GiB", **options_of(device_under_test)) as handle:
        train(model, 16)
        snapshot = handle._driver.snapshot()
    step = snapshot.step
    assert step is not None
    plan = plan_step(step, 1 << 60)
    assert plan is not None
    stock, least = Trial(step, plan), Trial(step, least_plan(step))
    told = "The step fits as it is: nothing moves and nothing is computed again, so you can leave fit out."
    report = describe(dataclasses.replace(snapshot, settled=stock))
    assert told in report
    assert "One more GiB" not in report
    room_bytes = stock.peak_bytes - 1
    assert told not in describe(dataclasses.replace(snapshot, settled=stock, room_bytes=room_bytes))
    report = describe(dataclasses.replace(snapshot, settled=least, room_bytes=least.peak_bytes))
    assert told not in report
    assert re.search(r"One more GiB would save [\d.]*[1-9][\d.]* ms a step\.", report)
    report = describe(dataclasses.replace(snapshot, settled=dataclasses.replace(least, plan=timed_as_none(least.plan))))
    assert "More memory would save no time." in report


def timed_as_none(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, step_s=0.0)


def test_blocks_of_which_the_same_is_told_share_a_line(device_under_test: Device):
    """Also if they are of different kinds, as the first one is whose input needs no gradient."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    with torchoffload.fit(blocks, "1GiB", blocks=list(blocks), **options_of(device_under_test)) as handle:
        for _ in range(16):
            blocks(torch.randn(4, 8, WIDTH)).square().mean().backward()
        told = handle.report().partition("What the blocks do:\n")[2].partition("Time against")[0].splitlines()
    texts = [line.partition(": ")[2] for line in told]
    assert len(texts) == len(set(texts)), told


def test_report_before_the_first_step_speaks_of_fit(device_under_test: Device):
    torchoffload.reset_stats()
    gc.collect()
    model = make_model()
    with torchoffload.fit(model, "1GiB", **options_of(device_under_test)):
        last_line = torchoffload.report().splitlines()[-1]
        told = "NOTHING MOVED. torchoffload.fit was called for Model, and no call of it with gradients was seen yet"
        assert last_line.startswith(told)
        train(model, 16)
        torchoffload.reset_stats()
        report = torchoffload.report()
        assert report.splitlines()[-1].startswith("NOTHING MOVED. torchoffload.fit was called for Model: report()")
        assert "offload_modules" not in report
        assert "compile" not in report


# ---- fit beside contexts, and beside offload_modules ----


@pytest.mark.parametrize("steps", [0, 16])
def test_a_context_around_a_fitted_model_is_warned_of_once(device_under_test: Device, steps: int):
    model = make_model()
    options = options_of(device_under_test)
    with torchoffload.fit(model, "1GiB", **options):
        train(model, steps)
        told = r"Model, which torchoffload\.fit was called for, is called inside of a context .* no longer true\. Leave"
        with pytest.warns(UserWarning, match=told) as seen, torchoffload.OffloadActivations(**options):
            model(torch.randn(4, 8, WIDTH)).backward()
        assert [each.filename for each in seen if "is called inside" in str(each.message)] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torchoffload.OffloadActivations(**options):
                model(torch.randn(4, 8, WIDTH)).backward()
            with torchoffload.OffloadActivations(**options), torch.no_grad():
                model(torch.randn(4, 8, WIDTH))


def test_a_fitted_model_is_warned_of_nothing_by_itself(device_under_test: Device):
    model = make_model()
    with warnings.catch_warnings(), torchoffload.fit(model, "1GiB", **options_of(device_under_test)) as handle:
        warnings.simplefilter("error")
        train(model, 16)
        handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)
        train(model, 16)
        with torchoffload.NoOpManager():
            train(model, 1)


def test_offload_modules_on_a_fitted_model_names_fit(device_under_test: Device):
    model, options = make_model(), options_of(device_under_test)
    with torchoffload.fit(model, "1GiB", blocks="net.blocks.*", **options):
        told = (
            r"^'net\.blocks\.1' is a block of a model that torchoffload\.fit was called for, .* leave offload_modules"
        )
        with pytest.raises(ValueError, match=told):
            torchoffload.offload_modules(model, "net.blocks.1", **options)
    with torchoffload.offload_modules(model, "net.blocks.1", **options):
        told = r"^'net\.blocks\.1' is offloaded already, by an earlier call of offload_modules: remove\(\) what that"
        with pytest.raises(ValueError, match=told):
            torchoffload.offload_modules(model, "net.blocks.*", **options)
        with pytest.raises(ValueError, match=told):
            torchoffload.fit(model, "1GiB", blocks="net.blocks.*", **options)


# ---- loops that try smaller batches ----


def halving(run: Any, batch: int) -> int:
    """As accelerate.utils.find_executable_batch_size does, and recognise errors as it does; return what ran."""
    while True:
        try:
            run(batch)
        except Exception as error:
            is_known = isinstance(error, RuntimeError) and len(error.args) == 1 and " out of memory." in error.args[0]
            if not is_known:
                raise
            batch //= 2
            continue
        return batch


def test_a_loop_that_halves_its_batch_goes_on_until_the_step_fits(device_under_test: Device):
    """fit is called again for the same model, and replaces what the call before has set up."""
    model, options = make_model(), options_of(device_under_test)
    with torchoffload.fit(model, "1GiB", move=False) as handle:
        train(model, 16, batch=8)
        memory = int(handle.frontier()[0].memory_bytes / 0.96) + 1
    tried, handles = [], []

    def run(batch: int) -> None:
        tried.append(batch)
        handles.append(torchoffload.fit(model, memory, **(options | {"move": False})))
        train(model, 16, batch=batch)

    assert halving(run, 64) == 8
    assert tried == [64, 32, 16, 8]
    assert [handle.phase for handle in handles] == ["removed"] * 3 + ["settled"]
    handles[-1].remove()
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.utils import find_executable_batch_size

        tried.clear()
        find_executable_batch_size(run, starting_batch_size=64)()
        assert tried == [64, 32, 16, 8] or tried[-1] <= 16  # it may shrink by a tenth
        handles[-1].remove()


def test_the_error_is_known_to_those_who_look_for_it():
    on_cpu, on_cuda = (does_not_fit("40 GiB is too little.", torch.device(kind)) for kind in ("cpu", "cuda"))
    for error in (on_cpu, on_cuda):
        assert isinstance(error, torch.OutOfMemoryError)
        assert len(error.args) == 1
        assert " out of memory." in error.args[0]
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.args) == (type(error), error.args)
    assert on_cuda.args[0].startswith("fit: CUDA out of memory. 40 GiB is too little.")
    for name, known in (("accelerate.utils.memory", "should_reduce_batch_size"), ("lightning", "is_oom_error")):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        module = importlib.import_module("lightning.pytorch.utilities.memory" if name == "lightning" else name)
        assert getattr(module, known)(on_cuda)
