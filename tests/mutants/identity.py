"""The scenarios of identity and layout: what two saves may share, what unpack rebuilds. What is wrong is a value."""

import torch
from scenario import NBYTES, NUMEL, Stage, scenario
from torch.testing._internal.two_tensor import TwoTensor

import torchoffload

NEW_VALUES = "the gradient at the saved values"
OLD_VALUES = "the gradient at the values of the save before"


def _name(gradient: torch.Tensor, *, saved: torch.Tensor, before: torch.Tensor) -> str:
    """Which of the two the gradient of a sine is at."""
    for name, values in ((NEW_VALUES, saved), (OLD_VALUES, before)):
        if torch.equal(gradient, values.cos()):
            return name
    return "another gradient"


# ---- identity ----


@scenario("IdentityChecksVersion", right=NEW_VALUES, wrong=OLD_VALUES)
def a_tensor_is_saved_again_after_it_was_changed(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        h = x + 0
        earlier = h.sin()
        stage.next_operator()
        before = h.detach().clone()
        h += 1
        (gradient,) = torch.autograd.grad(h.sin().sum(), x)
    del earlier
    return _name(gradient, saved=h.detach(), before=before)


@scenario("IdentityChecksVersionCounter", right=NEW_VALUES, wrong=OLD_VALUES)
def two_tensors_of_one_storage_count_their_versions_apart(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        earlier = x.sin()
        stage.next_operator()
        before = x.detach().clone()
        x.data.add_(1)  # counted by nobody who is left
        alias = x.data.requires_grad_()
        (gradient,) = torch.autograd.grad(alias.sin().sum(), alias)
    del earlier
    return _name(gradient, saved=alias.detach(), before=before)


@scenario("IdentityChecksData", right=NEW_VALUES, wrong=OLD_VALUES)
def a_storage_is_resized_and_filled_again_between_two_saves(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        h = x + 0
        earlier = h.sin()
        stage.next_operator()
        before = h.detach().clone()
        storage = h.untyped_storage()
        storage.resize_(0)
        taken = torch.empty(NUMEL)  # the memory it had
        storage.resize_(NBYTES)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(h):
            h.copy_(before + 1)  # as FSDP2 fills what it gathered
        (gradient,) = torch.autograd.grad(h.sin().sum(), x)
    del earlier, taken
    return _name(gradient, saved=h.detach(), before=before)


@scenario("IdentityChecksAllocation", right=NEW_VALUES, wrong=OLD_VALUES)
def a_storage_gets_other_memory_at_the_same_address_between_two_saves(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        h = x + 0
        earlier = h.sin()
        stage.next_operator()
        before = h.detach().clone()
        storage, address = h.untyped_storage(), h.data_ptr()
        storage.resize_(0)
        storage.resize_(NBYTES)
        assert h.data_ptr() == address
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(h):
            h.copy_(before + 1)
        (gradient,) = torch.autograd.grad(h.sin().sum(), x)
    del earlier
    return _name(gradient, saved=h.detach(), before=before)


@scenario("IdentityChecksWrapper", right=NEW_VALUES, wrong=OLD_VALUES)
def a_wrapper_is_saved_again_after_it_was_changed(stage: Stage) -> str:
    """What is written through a wrapper raises the version of the wrapper, and not of the tensor inside."""
    x = TwoTensor(stage.leaf(), stage.leaf()).requires_grad_()
    with stage.context():
        h = x + 0
        earlier = h.sin()
        stage.next_operator()
        before = h.a.clone()
        with torch.no_grad():
            h += 1
        (gradient,) = torch.autograd.grad(h.sin().sum(), x)
    del earlier
    return _name(gradient.a, saved=h.a, before=before)


@scenario("IdentityHoldsStorage", right=NEW_VALUES, wrong=OLD_VALUES)
def another_storage_may_get_the_address_of_one_that_is_gone(stage: Stage) -> str:
    x = stage.leaf()
    stage.simulation.tell_no_origins()
    with stage.context():
        earlier = x.sin()
        stage.next_operator()
        before = x.detach().clone()
        address = x.untyped_storage()._cdata
        x.data = torch.empty(0)
        hoard = []
        for _ in range(1000):
            hoard.append(torch.empty(0).untyped_storage())
            if hoard[-1]._cdata == address:
                break
        hoard[-1].resize_(NBYTES)
        refilled = torch.empty(0).set_(hoard[-1], 0, (NUMEL,))
        x.data = refilled.copy_(before + 1)
        (gradient,) = torch.autograd.grad(x.sin().sum(), x)
    del earlier
    return _name(gradient, saved=x.detach(), before=before)


@scenario("BorrowedStays", right=NEW_VALUES, wrong=OLD_VALUES)
def memory_that_a_storage_only_borrows_is_written_anew(stage: Stage) -> str:
    memory = torch.rand(NUMEL)
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), memory.device, NBYTES)
    x = torch.empty(0).set_(storage, 0, (NUMEL,)).requires_grad_()
    with stage.context():
        earlier = x.sin()
        stage.next_operator()
        before = x.detach().clone()
        memory.add_(1)  # by its owner, as the replay of a CUDA graph does
        (gradient,) = torch.autograd.grad(x.sin().sum(), x)
    del earlier
    return _name(gradient, saved=x.detach(), before=before)


@scenario("JoinOnlyWithinSpan", right="all values came back", wrong="the values outside what moved are not numbers")
def a_save_reaches_further_than_what_moved_of_its_storage(stage: Stage) -> str:
    base = stage.leaf()
    short, long = base[:16], base[:32]  # each reaches less than half of the storage
    with stage.context(min_offload_size=0):
        earlier = short.sin()
        y = long.sin()
    (gradient,) = torch.autograd.grad(y.sum(), base)
    del earlier
    expected = base.detach().cos()
    if torch.equal(gradient[:32], expected[:32]):
        return "all values came back"
    if torch.equal(gradient[:16], expected[:16]) and gradient[16:32].isnan().all():
        return "the values outside what moved are not numbers"
    return "another gradient"


@scenario("JoinOnlyAligned", right="as it was packed", wrong="4 bytes further on")
def a_complex_view_does_not_lie_on_the_grid_of_what_moved(stage: Stage) -> str:
    base = stage.leaf()
    pairs = torch.view_as_complex(base.view(-1, 2))
    with stage.context(min_offload_size=0):
        earlier = base[1:17].sin()
        y = pairs[1:5].sin()
    saved = torch.view_as_real(y.grad_fn._saved_self).flatten()
    del earlier
    names = {2: "as it was packed", 3: "4 bytes further on"}
    return next(
        (name for first, name in names.items() if torch.equal(saved, base.detach()[first : first + 8])), "other values"
    )


# ---- reloads ----


@scenario("BufferHeldUntilSeen", right="reloaded 1 times", wrong="reloaded 3 times")
def three_operators_save_one_tensor(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        outputs = [x.sin(), x.cos(), x.sinh()]
    torch.autograd.grad(sum(y.sum() for y in outputs), x)
    return f"reloaded {torchoffload.stats().records_reloaded} times"


@scenario("WeakIsFoundAgain", right="one storage", wrong="two storages")
def a_saved_tensor_is_looked_at_twice(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    first, second = y.grad_fn._saved_self, y.grad_fn._saved_self
    return "one storage" if first.data_ptr() == second.data_ptr() else "two storages"


# ---- layout ----


@scenario("StridesRestored", right="as it was packed", wrong="its elements in the order of memory")
def a_transposed_tensor_is_saved(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        y = x.view(8, NUMEL // 8).t().sin()
        assert y.stride() == (1, NUMEL // 8)
    saved = y.grad_fn._saved_self
    values = x.detach()
    if torch.equal(saved, values.view(8, NUMEL // 8).t()):
        return "as it was packed"
    return "its elements in the order of memory" if torch.equal(saved, values.view(NUMEL // 8, 8)) else "other values"


@scenario("AlignmentRestored", right="192 bytes into 512, as packed", wrong="8 bytes into 512")
def a_kernel_may_choose_by_the_address(stage: Stage) -> str:
    base = stage.leaf()
    assert base.data_ptr() % 512 == 0
    with stage.context(min_offload_size=0):
        y = base[48:64].sin()
    modulo = y.grad_fn._saved_self.data_ptr() % 512
    return f"{modulo} bytes into 512" + (", as packed" if modulo == base[48:].data_ptr() % 512 else "")


# ---- what is never moved ----


@scenario("ParameterStaysByStorage", right="moved 0 bytes", wrong=f"moved {NBYTES} bytes")
def an_alias_of_a_parameter_has_lost_its_base(stage: Stage) -> str:
    x = stage.leaf()
    parameter = torch.nn.Parameter(stage.leaf().detach(), requires_grad=False)
    with stage.context():
        seen = x * parameter
        alias = x * parameter.data
    moved = torchoffload.stats().bytes_offloaded
    del seen, alias
    return f"moved {moved} bytes"


@scenario("PackedInGraphTaskStays", right="moved nothing of it", wrong=f"moved {2 * NBYTES} bytes of it")
def backward_builds_a_graph_of_its_own(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        y = x.exp()
        moved_before = torchoffload.stats().bytes_offloaded
        (gradient,) = torch.autograd.grad(y, x, torch.ones(NUMEL, requires_grad=True), create_graph=True)
        stage.next_operator()
    stats = torchoffload.stats()
    moved = stats.bytes_offloaded - moved_before
    torch.autograd.grad(gradient.sum(), x)
    if moved == 0 and stats.records_kept.get("in_backward", 0) > 0:
        return "moved nothing of it"
    return f"moved {moved} bytes of it"
