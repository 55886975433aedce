"""Which blocks a fitted model has: by a dry run, by a scouting call, by its structure, or as the user says."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run, assert_same_gradients, execute
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.choosing import dry_run as dry_run_module
from torchoffload._fit.choosing.chooser import Chooser
from torchoffload._fit.choosing.collector import Collector
from torchoffload._fit.choosing.dry_run import DryRunError
from torchoffload._fit.choosing.structure import find_blocks, innermost_blocks

pytestmark = pytest.mark.devices("disk", "cuda")

ROOM = 1 << 50


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Hierarchical(nn.Module):
    """Stages of layers: the outermost modules that are repeated are the stages."""

    def __init__(self, reads_data: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(6) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.reads_data = reads_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        if self.reads_data:
            x = x * (1.0 if x.detach().cpu().contiguous().numpy().size else 2.0)
        return self.head(x).square().mean()


LAYERS = [f"stages.{stage}.layers.{layer}" for stage in range(3) for layer in range(6)]


def names(handle: torchoffload.Fitted) -> list[str]:
    return list(handle._driver.names.values())


def step(model: nn.Module) -> None:
    model(torch.randn(4, 8, WIDTH, device=next(model.parameters()).device)).backward()


def no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any) -> None:
        raise DryRunError("it must not run")

    monkeypatch.setattr(dry_run_module, "dry_run", fails)


def on(device: Device, model: nn.Module) -> nn.Module:
    return model.to("cuda") if device.name == "cuda" else model


def test_layers_are_blocks_and_not_the_stages_around_them(device_under_test: Device):
    model = on(device_under_test, Hierarchical())
    assert [type(each) for each in find_blocks(model)] == [Stage, Stage, Stage, nn.Linear]
    with torchoffload.fit(model, ROOM, **options_of(device_under_test)) as handle:
        step(model)
        assert names(handle) == [*LAYERS, "head"]
        assert not handle._driver.notes


def test_layers_need_less_memory_than_stages(device_under_test: Device):
    least = {}
    for blocks in (None, "stages.*"):
        model = on(device_under_test, Hierarchical())
        with torchoffload.fit(model, ROOM, move=False, blocks=blocks) as handle:
            for _ in range(6):
                step(model)
            least[blocks] = handle.frontier()[0].memory_bytes
    assert least[None] < least["stages.*"]


@pytest.mark.devices("disk", "simulated-late", "cuda")
@pytest.mark.parametrize("reads_data", [False, True])
def test_whatever_tells_the_blocks_the_bits_are_those_of_stock(device_under_test: Device, reads_data: bool):
    def program(run: Run):
        model = run.module(lambda: Hierarchical(reads_data))
        handle = None if run.stock else torchoffload.fit(model, ROOM, **options_of(device_under_test))
        for _ in range(10):
            loss = model(run.tensor(4, 8, WIDTH))
            loss.backward()
            run.check(loss=loss.detach(), gradients={name: each.grad for name, each in model.named_parameters()})
        if handle is not None:
            assert names(handle) == [*LAYERS, "head"]
            assert (" a first step in which all moves" in str(handle._driver.notes)) is reads_data
            assert handle.phase in {"trials", "settled"}
            handle.remove()
        run.check(hooks=sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()))

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


def test_in_a_scouting_call_all_that_is_saved_moves(device_under_test: Device):
    model = on(device_under_test, Hierarchical(reads_data=True))
    with torchoffload.fit(model, ROOM, **options_of(device_under_test)):
        torchoffload.reset_stats()
        step(model)
        stats = torchoffload.stats()
    assert stats.bytes_offloaded > 0.9 * 18 * (4 * 8 * WIDTH * 4 * 9)
    assert not any(each._forward_hooks for each in model.modules())


def test_without_moving_and_without_a_dry_run_the_innermost_repeated_modules_are_blocks():
    model = Hierarchical(reads_data=True)
    with torchoffload.fit(model, ROOM, move=False) as handle:
        assert names(handle) == [*LAYERS, "head"]
        for _ in range(6):
            step(model)
        assert names(handle) == [*LAYERS, "head"]
        assert "by the structure of the model" in handle._driver.notes[0]
        assert handle.phase != "survey"


def test_blocks_are_chosen_anew_if_a_dry_run_was_wrong(device_under_test: Device):
    class Doubles(Hierarchical):
        """The survey sees twice the tokens of what a dry run does."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat([x, x]) if x.abs().max().item() > 0 else x)

    model = on(device_under_test, Doubles())
    with torchoffload.fit(model, ROOM, **options_of(device_under_test)) as handle:
        step(model)
        assert not handle._driver.notes
        step(model)  # a scouting call
        assert names(handle) == [*LAYERS, "head"]
        for _ in range(8):
            step(model)
        assert "blocks save other bytes than a dry run of the model has said" in str(handle._driver.notes)
        assert names(handle) == [*LAYERS, "head"]
        assert handle.phase in {"trials", "settled"}
        assert "other bytes" in handle.report()


@pytest.mark.parametrize("blocks", ["stages.*", Stage])
def test_blocks_that_the_user_gives_are_the_blocks(
    device_under_test: Device, blocks: Any, monkeypatch: pytest.MonkeyPatch
):
    no_dry_run(monkeypatch)
    model = on(device_under_test, Hierarchical())
    with torchoffload.fit(model, ROOM, blocks=blocks, **options_of(device_under_test)) as handle:
        for _ in range(3):
            step(model)
        assert names(handle) == ["stages.0", "stages.1", "stages.2"]
        assert not handle._driver.notes


def test_a_plan_of_a_file_has_the_blocks_of_the_file(
    device_under_test: Device, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    model = on(device_under_test, Hierarchical())
    with torchoffload.fit(model, ROOM, blocks=Stage, **options_of(device_under_test)) as handle:
        for _ in range(40):
            step(model)
        handle.save(tmp_path / "plan.json")
    assert set(json.loads((tmp_path / "plan.json").read_text())["names"]) == {"stages.0", "stages.1", "stages.2"}
    no_dry_run(monkeypatch)
    with torchoffload.fit(model, plan=tmp_path / "plan.json", **options_of(device_under_test)) as again:
        step(model)
        assert again.phase == "settled"
        assert names(again) == ["stages.0", "stages.1", "stages.2"]


def test_lists_are_no_blocks_and_may_be_empty():
    model = Hierarchical()
    model.unused, model.norms = nn.ModuleList(), nn.ModuleDict({"one": nn.LayerNorm(4), "none": nn.ModuleList()})
    found = innermost_blocks(model)
    assert model.norms["one"] in found
    assert not any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in [*found, *find_blocks(model)])
    with torchoffload.fit(model, ROOM, move=False) as handle:
        step(model)
        assert names(handle) == [*LAYERS, "head", "norms.one"]


class Shared(nn.Module):
    """One embedding under three names, as in T5, and one layer that stands in a list twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(16, WIDTH)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        layer = BLOCKS["transformer"]()
        for part in (self.encoder, self.decoder):
            part.embed = self.shared
            part.layers = nn.ModuleList([layer, BLOCKS["transformer"](), layer])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.shared(tokens)
        for part in (self.encoder, self.decoder):
            x = x + part.embed(tokens)
            for layer in part.layers:
                x = layer(x)
        return x.square().mean()


@pytest.mark.devices("disk", "simulated-late", "cuda")
@pytest.mark.parametrize("needs_structure", [False, True])
def test_a_module_that_is_registered_twice_is_one_block(
    device_under_test: Device, needs_structure: bool, monkeypatch: pytest.MonkeyPatch
):
    if needs_structure:
        no_dry_run(monkeypatch)

    def program(run: Run):
        model = run.module(Shared)
        handle = None if run.stock else torchoffload.fit(model, ROOM, **options_of(device_under_test))
        for _ in range(6):
            loss = model((run.tensor(2, 8).abs() * 4).long() % 16)
            loss.backward()
            run.check(loss=loss.detach(), gradients={name: each.grad for name, each in model.named_parameters()})
        if handle is not None:
            assert len(names(handle)) == len(set(names(handle)))
            assert "encoder.layers.0" in names(handle)
            assert "decoder.layers.0" not in names(handle)
            handle.remove()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


def test_the_modules_of_a_flat_sequence_are_blocks_by_themselves():
    """Each is called by the sequence, and so is the smallest thing that can be a block."""
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    with torchoffload.fit(model, ROOM, move=False) as handle:
        model(torch.randn(4, 8, WIDTH)).sum().backward()
        assert set(names(handle)) <= {"Sequential", *map(str, range(12))}


class Lazy(nn.Module):
    """Its parameters have no values before its first call. ``has_unused``: one of its layers is never called."""

    def __init__(self, has_unused: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.LazyLinear(4 * WIDTH), nn.LazyBatchNorm1d(), nn.LazyLinear(WIDTH)
        self.unused = nn.LazyLinear(4) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


@pytest.mark.devices("disk", "simulated-late", "cuda")
@pytest.mark.parametrize("has_unused", [False, True])
@pytest.mark.parametrize("options", [{}, {"blocks": "*"}, {"move": False}], ids=str)
def test_a_lazy_model_is_trained_and_planned(device_under_test: Device, has_unused: bool, options: dict[str, Any]):
    def program(run: Run):
        torch.manual_seed(0)
        model = nn.Sequential(*(Lazy(has_unused) for _ in range(4))).to(run.device)
        handle = None if run.stock else torchoffload.fit(model, ROOM, **(options_of(device_under_test) | options))
        for _ in range(24):
            loss = model(run.tensor(16, WIDTH)).square().mean()
            loss.backward()
            known = {name: each for name, each in model.named_parameters() if not nn.parameter.is_lazy(each)}
            run.check(loss=loss.detach(), parameters=known, gradients={name: each.grad for name, each in known.items()})
        if handle is not None:
            assert handle.phase == "settled", handle.report()
            assert not handle._driver._following.gone
            assert len(names(handle)) >= 4
            assert handle._driver.step is not None
            assert len(handle._driver.step.calls) == len(names(handle))
            assert has_unused or "dry run" not in str(handle._driver.notes)
            handle.remove()

    if options.get("move", True):
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)
    else:
        stock, fitted = (execute(program, device_under_test, stock=stock) for stock in (True, False))
        assert stock == fitted


def test_a_lazy_model_can_be_counted_before_its_first_call():
    model = nn.Sequential(Lazy(has_unused=True), nn.Linear(4, 4))
    assert Collector(model).tree().fixed_bytes == 2 * 4 * (4 * 4 + 4) + 8  # and the norm's count of batches


class Fails(Hierarchical):
    def __init__(self) -> None:
        super().__init__(reads_data=True)
        self.fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        if self.fails:
            raise ArithmeticError("once")
        return loss


def test_a_scouting_call_that_raises_is_made_again(device_under_test: Device):
    model = on(device_under_test, Fails())
    with torchoffload.fit(model, ROOM, **options_of(device_under_test)) as handle:
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                step(model)
        model.fails = False
        for _ in range(10):  # a GPU is surveyed for longer
            step(model)
            if handle.phase != "survey":
                break
        assert names(handle) == [*LAYERS, "head"]
        assert handle.phase != "survey"
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


class Ranks:
    """Stands for ranks of which another one has chosen other blocks, or the same."""

    def __init__(self, differ: bool) -> None:
        self.differ = differ

    def largest(self, *values: float) -> list[float]:
        return [each + self.differ for each in values]


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_that_have_chosen_different_blocks_take_those_of_the_structure(differ: bool):
    class Driver:
        agreement, notes = Ranks(differ), []
        taken: Any = None

        def take_blocks(self, chosen: list[Any]) -> None:
            self.taken = [each.module for each in chosen]

    model, driver = Hierarchical(), Driver()
    driver.notes = []
    chooser = Chooser(model, may_move=True, may_scout=False, options=torchoffload.OffloadOptions())
    chooser.first_blocks()
    chooser.agree(driver)
    assert driver.taken == (innermost_blocks(model) if differ else None)
    assert bool(driver.notes) is differ
    driver.taken = None
    chooser.agree(driver)
    assert driver.taken is None
