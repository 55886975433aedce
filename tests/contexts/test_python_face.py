"""The contexts and functions that a user meets: entering and leaving, copying, switching off, and what they tell."""

import copy
import dataclasses
import gc
import pathlib
import pickle
import threading
import types
import warnings
import weakref

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

import torchoffload
from places import DOCS
from torchoffload import NoOpManager, OffloadActivations
from torchoffload._core import core
from torchoffload._pytorch.hook_stack import innermost, top_pack_hook
from torchoffload._warnings import warn_user

WIDTH = 64


@pytest.fixture
def context(tmp_path):
    """A context that moves everything it may, and needs no accelerator."""
    return OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0, offload_window_bytes=0)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert innermost() is None
    assert top_pack_hook() is None


def step(*contexts):
    """The gradient of one step with forward inside `contexts`."""
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()
    for each in contexts:
        each.__enter__()
    loss = (x.sin() * x).exp().sum()
    for each in reversed(contexts):
        each.__exit__(None, None, None)
    loss.backward()
    return x.grad


def offloading():
    hook = top_pack_hook()
    return hook is not None and isinstance(getattr(hook, "__self__", None), core.Context)


# Entering and leaving.


def test_both_hooks_of_both_contexts_are_builtins(context):
    for each in (context, NoOpManager()):
        assert isinstance(each, saved_tensors_hooks)
        assert isinstance(each.pack_hook, types.BuiltinFunctionType)
        assert isinstance(each.unpack_hook, types.BuiltinFunctionType)


def test_gradients_are_the_same_and_something_moved(context):
    expected = step()
    torchoffload.reset_stats()
    assert torch.equal(step(context), expected)
    assert torchoffload.stats().bytes_offloaded >= WIDTH * WIDTH * 4


def test_a_context_is_used_again_and_again(context):
    expected = step()
    for _ in range(3):
        assert torch.equal(step(context), expected)


def test_a_context_is_entered_inside_itself(context):
    expected = step()
    assert torch.equal(step(context, context, context), expected)


def test_backward_runs_inside_or_after(context):
    expected = step()
    with context:
        assert torch.equal(step(), expected)
        assert torch.equal(step(context), expected)


def test_an_exception_passes_through(context):
    for each in (context, NoOpManager()):
        with pytest.raises(ZeroDivisionError), each:
            raise ZeroDivisionError
    assert torch.equal(step(context), step())


@pytest.mark.parametrize("kind", ["offload", "noop"])
def test_leaving_more_often_than_entered_is_an_error_and_takes_no_hooks_away(context, kind):
    leaver = context if kind == "offload" else NoOpManager()
    message = f"^{type(leaver).__name__} left more often than entered on this thread"
    with pytest.raises(RuntimeError, match=message):
        leaver.__exit__(None, None, None)
    with leaver:
        pass
    with save_on_cpu():
        theirs = top_pack_hook()
        with pytest.raises(RuntimeError, match=message):
            leaver.__exit__(None, None, None)
        assert top_pack_hook() is theirs
    assert torch.equal(step(context), step())


def test_contexts_are_left_in_reverse_order(context):
    other = NoOpManager()
    context.__enter__()
    other.__enter__()
    with pytest.raises(RuntimeError, match="OffloadActivations left while a NoOpManager that was entered after it"):
        context.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert offloading()
    context.__exit__(None, None, None)


def test_a_context_is_left_on_the_thread_that_entered_it(context):
    errors = []

    def leave():
        try:
            context.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with context:
        worker = threading.Thread(target=leave)
        worker.start()
        worker.join()
        assert offloading()
    assert ["left more often than entered on this thread" in error for error in errors] == [True]


def test_one_context_serves_many_threads(context):
    expected, results = step(), []
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        results.extend(step(context) for _ in range(5))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 20
    assert all(torch.equal(result, expected) for result in results)


def test_an_entry_that_torch_refuses_is_undone(context):
    with disable_saved_tensors_hooks("not here"):
        for each in (context, NoOpManager()):
            with pytest.raises(RuntimeError, match="not here"):
                each.__enter__()
            assert innermost() is None
    assert torch.equal(step(context), step())


def test_contexts_of_different_tiers_do_not_nest(context):
    inner = OffloadActivations()
    with context:
        with pytest.raises(RuntimeError, match="tier"):
            inner.__enter__()
        assert offloading()
    assert torch.equal(step(context), step())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without an accelerator")
def test_without_an_accelerator_the_host_tier_names_the_disk_tier():
    for options in ({}, {"use_pin_memory": False}, {"use_streams": False}, {"offload_window_bytes": 0}):
        with pytest.raises(RuntimeError, match='tier="disk"'), OffloadActivations(**options):
            pass


def test_noop_manager_keeps_everything(context):
    expected = step()
    torchoffload.reset_stats()
    assert torch.equal(step(context, NoOpManager()), expected)
    assert torchoffload.stats().handles == 0


def test_noop_manager_leaks_nothing():
    x = torch.randn(WIDTH, requires_grad=True)
    with NoOpManager():
        y = x.exp()  # saves its own output: kept as it is, that would be a cycle
    dead = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert dead() is None
    finally:
        gc.enable()


# Switching off.


def test_switched_off_no_context_pushes_hooks(context, monkeypatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    for each in (context, NoOpManager(), OffloadActivations()):  # the last one has no accelerator, and needs none
        with each:
            assert top_pack_hook() is None
        with pytest.raises(RuntimeError, match="left more often"):
            each.__exit__(None, None, None)


def test_the_switch_is_read_at_entry(context, monkeypatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    with context:
        monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "0")
        with context:
            assert offloading()
            monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
        assert top_pack_hook() is None


def test_a_strange_switch_is_an_error(context, monkeypatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "please")
    with pytest.raises(ValueError, match=r"^TORCHOFFLOAD_DISABLE must be 1 .* got 'please'$"):
        context.__enter__()


# Copies and pickles.


def copies_of(context):
    return copy.copy(context), copy.deepcopy(context), pickle.loads(pickle.dumps(context))


def test_copies_have_equal_options_and_a_life_of_their_own(context):
    expected = step()
    for twin in copies_of(context):
        assert twin is not context
        assert twin.options == context.options
        assert torch.equal(step(context, twin), expected)


def test_a_copy_made_while_entered_is_not_entered(context):
    with context:
        twin = copy.deepcopy(context)
    with pytest.raises(RuntimeError, match="left more often"):
        twin.__exit__(None, None, None)


def test_noop_manager_is_copied_and_pickled():
    for twin in copies_of(NoOpManager()):
        with twin:
            assert top_pack_hook() == core.noop_pack


def test_a_deep_copy_follows_its_model_and_copies_none_alone():
    model = torch.nn.Linear(2, 2)
    context = OffloadActivations(model=model)
    assert copy.deepcopy(context)._live_model() is model
    assert copy.copy(context)._live_model() is model
    twin = copy.deepcopy({"model": model, "context": context})
    assert twin["context"]._live_model() is twin["model"]


def test_a_pickle_leaves_the_model_out():
    context = OffloadActivations(model=torch.nn.Linear(512, 512))
    data = pickle.dumps(context)
    assert len(data) < 4096
    assert pickle.loads(data)._live_model() is None


def test_a_context_does_not_keep_its_model_alive(context):
    model = torch.nn.Linear(2, 2)
    kept = OffloadActivations(model=model, tier="disk", disk_dir=context.options.disk_dir)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert torch.equal(step(kept), step())
    assert kept.remove_head_hooks() == 0


def test_a_context_dies_with_its_last_reference(context):
    context_dies = weakref.ref(copy.copy(context))
    assert context_dies() is None


# What is never moved.


class WithBuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH))
        self.lazy = torch.nn.LazyLinear(3)

    def forward(self, x):
        return x * self.mask * self.weight


def bytes_moved_by(model, context):
    torchoffload.reset_stats()
    with context:
        loss = model(torch.ones(WIDTH, WIDTH, requires_grad=True)).sum()
    loss.backward()
    return torchoffload.stats().bytes_offloaded


def test_a_models_buffers_stay_when_the_model_is_given(tmp_path):
    model = WithBuffer()
    options = {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0, "learn": False}
    given = bytes_moved_by(model, OffloadActivations(model=model, **options))
    assert bytes_moved_by(model, OffloadActivations(**options)) - given == WIDTH * WIDTH * 4


def test_never_offload_marks_a_tensor(context):
    x = torch.ones(WIDTH, WIDTH)
    torchoffload.never_offload(x)
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    torchoffload.reset_stats()
    with context:
        loss = (weight * x).sum()
    loss.backward()
    assert torchoffload.stats().records_kept["marked"] == 1


@pytest.mark.parametrize("value", [None, 1, [torch.ones(1)], torch.Tensor])
def test_never_offload_takes_tensors_only(value):
    with pytest.raises(TypeError, match=r"^never_offload takes a torch.Tensor, got "):
        torchoffload.never_offload(value)


# What it tells.


def test_the_cores_counts_are_the_fields_of_the_statistics(context):
    step(context)
    counted = core.stats()
    assert counted.keys() == {field.name for field in dataclasses.fields(torchoffload.OffloadStats)}
    for row in counted["tapes"]:
        assert row.keys() == {field.name for field in dataclasses.fields(torchoffload.TapeStats)}


def test_statistics_have_a_row_per_tape_and_start_again(context):
    torchoffload.reset_stats()
    for _ in range(3):
        step(context)
    seen = torchoffload.stats()
    assert len(seen.tapes) == 3
    assert sum(tape.bytes_offloaded for tape in seen.tapes) == seen.bytes_offloaded > 0
    torchoffload.reset_stats()
    again = torchoffload.stats()
    assert (again.bytes_offloaded, again.handles, again.tapes) == (0, 0, ())
    assert again.live_handles == again.live_records == again.live_slots == again.live_tapes == 0


def test_trim_tells_how_much_it_gave_back(context):
    step(context)
    assert isinstance(torchoffload.trim(), int)


def test_host_memory_is_that_of_this_machine():
    seen = torchoffload.host_memory()
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    assert abs(seen.total_bytes - total_kib * 1024) <= 0.01 * seen.total_bytes
    room_bytes = seen.available_bytes + torchoffload.stats().pinned_bytes
    assert 0 < seen.default_budget_bytes <= 0.8 * room_bytes < seen.total_bytes
    assert seen.limit_bytes is None or seen.limit_bytes > 0


def test_a_warning_of_the_core_shows_the_users_line():
    with pytest.warns(UserWarning, match=r"^torchoffload: the disk is full$") as caught:
        warn_user("torchoffload: the disk is full")
    assert [warning.filename for warning in caught] == [__file__]


def test_a_warning_may_be_made_an_error():
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="the disk is full"):
        warn_user("torchoffload: the disk is full")


# The package.


def test_every_public_name_is_there_and_documented():
    api = (DOCS / "api.md").read_text()
    for name in torchoffload.__all__:
        value = getattr(torchoffload, name)
        assert f"`{name}" in api
        assert name == "__version__" or value.__doc__
