"""What is never moved, and why: each reason by its name, with gradients the same."""

import gc

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients
from models import mlp


def test_parameters_never_move(device_under_test: Device):
    def program(run: Run):
        weight, frozen = run.parameter(32, 32), nn.Parameter(run.tensor(32, 32), requires_grad=False)
        x = run.leaf(16, 32)
        with run.offload():
            y = x @ weight @ frozen  # x, x @ weight is not saved: frozen needs no gradient
        y.sum().backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2048, kept_reason="parameter")


VIEWS_OF_PARAMETERS = {
    "transposed": lambda p: p.t(),
    "slice": lambda p: p[4:20],
    "view-of-view": lambda p: p.t()[3:].view(-1)[:64] if p.t()[3:].is_contiguous() else p.t()[3:],
    "detached": lambda p: p.detach(),
    "detached-transposed": lambda p: p.detach().t(),
    "data": lambda p: p.data,
    "detached-slice": lambda p: p.detach()[8:],
}


# An alias that lost its base is known by storage, once the Parameter was seen or `model` is given.
SEEN_AS = [(view, True) for view in VIEWS_OF_PARAMETERS] + [
    (view, False) for view in ("transposed", "slice", "view-of-view")
]


@pytest.mark.parametrize(
    ("view", "seen"),
    SEEN_AS,
    ids=lambda value: {True: "seen-before", False: "first-seen-as-an-alias"}.get(value, value),
)
def test_aliases_of_parameters_never_move(device_under_test: Device, view: str, seen: bool):
    def program(run: Run):
        parameter, x = run.parameter(32, 32), run.leaf(4)
        with run.offload():
            if seen:
                x = Save.apply(x, lambda unpacked: None, parameter)
            y = Save.apply(x, lambda unpacked: run.check(view=unpacked), VIEWS_OF_PARAMETERS[view](parameter))
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="parameter")


def test_aliases_of_a_given_models_parameters_and_buffers_never_move(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(lambda: nn.BatchNorm1d(1024)), run.leaf(4)
        with run.offload() if run.stock else run.offload(model=model):
            y = Save.apply(x, lambda *unpacked: run.check(views=unpacked), model.weight.detach(), model.running_mean)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="parameter")


def test_an_alias_outlives_its_parameter(device_under_test: Device):
    """The set of parameters' storages is weak: another storage at a dead parameter's address moves."""

    def program(run: Run):
        x = run.leaf(4)
        for _ in range(5):
            parameter = run.parameter(32, 32)
            with run.offload():
                y = Save.apply(x, lambda unpacked: None, parameter)
            del parameter, y
            gc.collect()
            plain = run.tensor(32, 32)  # likely at the same address
            with run.offload():
                y = Save.apply(x, lambda unpacked: run.check(plain=unpacked), plain)
            del plain
            y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=5 * 4096, kept_reason="parameter")


def test_a_linear_layer_moves_its_input_and_not_its_weight(device_under_test: Device):
    def program(run: Run):
        first, second = run.module(lambda: nn.Linear(32, 64)), run.module(lambda: nn.Linear(64, 16))
        x = run.leaf(16, 32)
        with run.offload():
            y = second(first(x).relu())  # x: 2048; the result of relu: 4096
        y.sum().backward()
        return first, second, x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2048 + 4096, kept_reason="parameter")
    assert stats.records_offloaded == 2


def test_marked_tensors_never_move(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        marked = run.tensor(32, 32)
        torchoffload.never_offload(marked)
        with run.offload():
            a = x.exp()  # moves: 4096
            y = a * marked
            z = Save.apply(y, lambda *unpacked: run.check(views=unpacked), marked.t(), marked[8:].detach())
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="marked")


def test_an_intermediate_is_marked_inside_the_forward(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            logits = x * 3
            torchoffload.never_offload(logits)
            y = logits.sin() * logits.exp()  # sin's result and exp's result move
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 4096, kept_reason="marked")


@pytest.mark.parametrize(("minimum", "moves"), [(4095, True), (4096, True), (4097, False)])
def test_the_minimum_counts_bytes_and_is_itself_moved(device_under_test: Device, minimum: int, moves: bool):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload(min_offload_size=minimum):
            y = x.exp()
        y.sum().backward()
        return x.grad

    kept = {} if moves else {"kept_reason": "small"}
    assert_same_gradients(program, device=device_under_test, moved_bytes=4096 if moves else 0, **kept)


def test_the_minimum_counts_storages_not_elements(device_under_test: Device):
    def program(run: Run):
        x, big = run.leaf(1), run.tensor(64, 1024)
        column = run.tensor(64, 64)
        with run.offload(min_offload_size=8192):
            y = x * big[3]  # 4096 of 262144: moves alone
            y = y.sum() + x * column[:, 5]  # reaches all 16384: moves
            y = y.sum() + x * run.tensor(64, 1).expand(64, 64)  # 16384 by its sizes, 256 by its storage: small
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096 + 64 * 64 * 4, kept_reason="small")


def test_kept_is_decided_once_for_a_record(device_under_test: Device):
    """Later saves of a storage follow the first: what stays on the device anyway is not copied as well."""

    def program(run: Run):
        x, big = run.leaf(4), run.tensor(64, 64)
        with run.offload(budget_bytes=1024):
            y = Save.apply(x, lambda *unpacked: run.check(a=unpacked), big)
            y = Save.apply(y, lambda *unpacked: run.check(b=unpacked), big, big.t(), big[5:60])
        y.sum().backward()

    with pytest.warns(UserWarning, match="budget_bytes"):
        assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="tier_full")


# ---- storages that are resized under us ----


def test_a_storage_resized_to_nothing_before_its_copy_is_kept(device_under_test: Device):
    """As FSDP2 does with unsharded parameters: freed after forward, filled again before backward."""

    def program(run: Run):
        x, gathered, values = run.leaf(32, 32), run.tensor(32, 32), run.tensor(32, 32)
        gathered.copy_(values)
        with run.offload():
            y = Save.apply(x.exp(), lambda unpacked: run.check(gathered=unpacked), gathered)
            gathered.untyped_storage().resize_(0)
            z = y.sin()
        gathered.untyped_storage().resize_(4096)
        with torch.no_grad():
            torch._C._autograd._unsafe_set_version_counter((gathered,), (gathered._version,))
            gathered.data.copy_(values)
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 4096, kept_reason="resized")


def test_a_storage_resized_after_its_copy_comes_back_from_the_slot(device_under_test: Device):
    def program(run: Run):
        x, gathered, values = run.leaf(32, 32), run.tensor(32, 32), run.tensor(32, 32)
        gathered.copy_(values)
        with run.offload(offload_window_bytes=0):  # the copy has ended when the storage is resized
            y = Save.apply(x.exp(), lambda unpacked: run.check(gathered=unpacked), gathered)
            for _ in range(6):
                y = y.sigmoid()
        if run.stock:
            y.sum().backward()
        else:
            assert torchoffload.stats().bytes_offloaded == 8 * 4096  # else the next line would crash the process
            gathered.untyped_storage().resize_(0)
            y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=8 * 4096)


def test_a_storage_that_grows_is_another_record(device_under_test: Device):
    def program(run: Run):
        x, growing = run.leaf(4), run.tensor(32, 32)
        with run.offload(offload_window_bytes=0):  # the copy has ended when the storage is resized
            y = Save.apply(x, lambda unpacked: run.check(a=unpacked), growing)
            y = y.sin()
            y = y.sin()
            growing.resize_(64, 32)
            growing.detach().zero_()
            z = Save.apply(x, lambda unpacked: run.check(b=unpacked), growing)
        z.sum().backward()
        del y

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


# ---- the budget ----


def test_over_budget_the_rest_is_kept_with_one_warning(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        for _ in range(2):
            with run.offload(budget_bytes=8192):
                y = model(model(x))
            y.square().sum().backward()
        return model, x.grad

    with pytest.warns(UserWarning, match="budget_bytes") as caught:
        stats = assert_same_gradients(
            program, device=device_under_test, min_moved_fraction=0.05, kept_reason="tier_full"
        )
    assert sum("budget_bytes" in str(each.message) for each in caught) <= 2, "one warning per context"
    assert 0 < stats.bytes_offloaded <= 2 * 8192
    if device_under_test.tier == "host":  # a spill file's slots are whole blocks of the disk
        assert stats.peak_slot_bytes <= 8192


def test_the_budget_is_free_again_after_backward(device_under_test: Device):
    def program(run: Run):
        x, context = run.leaf(32, 32), run.offload(budget_bytes=2 * 4096)
        for _ in range(5):
            with context:
                y = x.exp().exp()
            y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=5 * 2 * 4096)
    assert "tier_full" not in stats.records_kept


def test_over_budget_with_error_raises_and_the_next_step_is_right(device_under_test: Device):
    def program(run: Run):
        x, context = run.leaf(32, 32), run.offload(budget_bytes=2 * 4096, on_full="error")
        for _ in range(2):
            with context:
                y = x.exp().exp()
                if not run.stock:
                    with pytest.raises(RuntimeError, match="budget_bytes"):
                        y.exp()
            y.sum().backward()
            run.check(gradient=x.grad)

    # The record that does not fit is made, and refused, in its pack.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 2 * 4096)


# ---- memory of others ----


class Graph:
    """Gives out one storage over memory of its own, written anew when nobody holds the storage, as CUDA graphs do."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), memory.device, memory.nbytes)
        self.output = torch.empty(0, device=memory.device).set_(storage, 0, memory.shape, memory.stride())
        self.uses = self.count_uses()
        self.replays = 0

    def count_uses(self) -> tuple[int, int]:
        return torch._C._storage_Use_Count(self.output.untyped_storage()._cdata), self.output._use_count()

    def replay(self, value: float) -> torch.Tensor:
        if self.count_uses() != self.uses:
            return torch.full_like(self.memory, value)
        self.memory.fill_(value)  # no version counter hears of it
        self.replays += 1
        return self.output


def test_memory_that_a_storage_borrows_is_held_as_in_stock(device_under_test: Device):
    """Were it let go of, the next replay would write it anew, with the same storage, version and address."""

    def program(run: Run):
        y = run.leaf(4)
        graph = Graph(run.tensor(32, 32))
        with run.offload(offload_window_bytes=0):
            for value in range(3):
                y = Save.apply(y, lambda unpacked: run.check(output=unpacked), graph.replay(value)).exp()
        run.check(replays=graph.replays)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 4096 + 3 * 16, kept_reason="borrowed")
