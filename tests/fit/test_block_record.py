"""Recorder and groups: what a block's operators read, make and write, and what may be kept or computed again."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from planned_blocks import WIDTH, Dropouts, Normalised, record
from torchoffload._fit.block.graph import OperatorGroup, block_frontier, group_operators
from torchoffload._fit.block.record import BlockRecord

X = torch.ones(4, 8, WIDTH)
aten = torch.ops.aten


class Calls(nn.Module):
    """A block that calls a function, and has a buffer."""

    def __init__(self, function: Callable[["Calls", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.elsewhere = torch.zeros(WIDTH)  # no buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def record_of(function: Callable[[Calls, torch.Tensor], torch.Tensor]) -> BlockRecord:
    return record(Calls(function), X)


def groups_of(function: Callable[[Calls, torch.Tensor], torch.Tensor]) -> dict[str, OperatorGroup]:
    """The groups by the operator that made what they made."""
    recorded = record_of(function)
    grouped = group_operators(recorded)
    assert grouped is not None
    return {recorded.operators[group.operators[0]].operator.__name__: group for group in grouped}


def operators_of(recorded: BlockRecord) -> list[object]:
    return [call.operator for call in recorded.operators]


def test_operators_are_recorded_in_order_and_views_are_not():
    recorded = record_of(lambda block, x: x.transpose(0, 1).exp().transpose(0, 1).view(-1).sin().view(x.shape))
    assert operators_of(recorded) == [aten.exp.default, aten.sin.default]


def test_what_is_read_through_a_view_is_the_same_storage():
    recorded = record_of(lambda block, x: x.exp().view(-1)[3:].sin())
    exp, sin = recorded.operators
    assert {number for number, _ in sin.reads} == exp.makes
    assert recorded.nbytes[next(iter(exp.makes))] == 4 * X.numel()


def test_what_autograd_saves_is_noted():
    recorded = record_of(lambda block, x: (x.exp() + 1).sin())
    exp, add, sin = recorded.operators
    assert recorded.saved == exp.makes | add.makes
    assert not recorded.saved & sin.makes


def test_operators_take_time():
    assert all(call.duration_ns > 0 for call in record_of(lambda block, x: x.exp().sin()).operators)


def test_groups_name_what_they_read():
    groups = groups_of(lambda block, x: x.exp() * x.sin())
    assert groups["exp.default"].inputs == ()
    assert groups["mul.Tensor"].inputs == (0, 1)


def test_an_operator_in_place_belongs_to_what_made_its_storage():
    groups = groups_of(lambda block, x: (x * 2).add_(1).sin())
    assert groups["mul.Tensor"].operators == (0, 1)
    assert groups["mul.Tensor"].may_keep  # nobody reads what was there before
    assert groups["mul.Tensor"].may_recompute


def test_a_value_that_is_read_before_it_is_written_to_is_not_kept():
    def function(block: Calls, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        early = h.exp()
        return h.add_(1).sin() * early

    groups = groups_of(function)
    assert (groups["tanh.default"].may_keep, groups["tanh.default"].may_recompute) == (False, True)


def test_what_draws_random_numbers_is_noted():
    recorded = record(Dropouts(), X)
    assert sum(call.draws for call in recorded.operators) == 2
    groups = group_operators(recorded)
    assert groups is not None
    assert all(group.may_recompute for group in groups)


def test_an_operator_that_draws_without_a_tag_is_noticed():
    library = torch.library.Library("torchoffload_test", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x + torch.rand(1).item(), "CompositeExplicitAutograd")
    try:
        recorded = record_of(lambda block, x: torch.ops.torchoffload_test.noise(x.detach()) * x)
    finally:
        library._destroy()
    assert [call.draws for call in recorded.operators] == [True, False]


@pytest.mark.parametrize("has_state", [True, False])
def test_an_operator_with_a_dropout_state_of_its_own_is_not_called_again(has_state: bool):
    """As cuDNN's recurrent layers: they advance the state, and no schema says so."""
    library = torch.library.Library("torchoffload_test", "FRAGMENT")
    library.define("recurrent(Tensor x, Tensor? dropout_state) -> Tensor")

    def recurrent(x: torch.Tensor, dropout_state: torch.Tensor | None) -> torch.Tensor:
        calls.append(x)
        return x.clone() if dropout_state is None else x * dropout_state.data.add_(1)

    calls: list[torch.Tensor] = []
    library.impl("recurrent", recurrent, "CompositeExplicitAutograd")
    state = torch.zeros(()) if has_state else None
    try:
        recorded = record_of(lambda block, x: torch.ops.torchoffload_test.recurrent(x.detach(), state) * x)
    finally:
        library._destroy()
    assert [call.runs_once for call in recorded.operators] == [has_state, False]
    assert len(calls) == (1 if has_state else 2)  # once more to compare the bits


def test_batch_normalization_is_computed_again_on_other_statistics():
    recorded = record(Normalised(), X)
    groups = group_operators(recorded)
    assert groups is not None
    norm = next(call for call in recorded.operators if "batch_norm" in call.operator.__name__)
    group = next(group for group in groups if recorded.operators.index(norm) in group.operators)
    assert (group.may_keep, group.may_recompute) == (True, True)


def test_what_reads_a_buffer_that_the_block_writes_is_not_computed_again():
    def function(block: Calls, x: torch.Tensor) -> torch.Tensor:
        block.seen.add_(1)
        return x.exp() * block.seen.sin()

    groups = groups_of(function)
    assert not groups["sin.default"].may_recompute
    assert groups["exp.default"].may_recompute


def write_to_input(block: Calls, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.add_(1)
    return x.exp()


def draw_into_a_buffer(block: Calls, x: torch.Tensor) -> torch.Tensor:
    block.seen.uniform_()
    return x.exp()


@pytest.mark.parametrize("function", [write_to_input, draw_into_a_buffer])
def test_a_write_to_what_is_not_the_blocks_own_is_made_once(function):
    recorded = record_of(function)
    assert [call.runs_once for call in recorded.operators] == [True, False]
    assert block_frontier(recorded)


def test_a_number_for_the_program_is_no_operator_of_the_record():
    recorded = record_of(lambda block, x: x.exp() * x.sum().item())
    assert aten._local_scalar_dense.default not in operators_of(recorded)
    assert block_frontier(recorded)[0].kept_bytes == 0


def test_the_least_memory_keeps_nothing_and_the_least_time_runs_nothing():
    corners = block_frontier(record_of(lambda block, x: (x.exp() + 1).sin().cos()))
    assert corners[0].kept_bytes == 0
    assert not corners[0].plan.kept
    assert corners[-1].recompute_ns == 0
    assert corners[-1].kept_bytes == 3 * 4 * X.numel()
    assert corners[-1].plan.skipped == {3}  # cos, which is the block's output and is not saved
