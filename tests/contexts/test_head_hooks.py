"""The hooks that exempt an output head: installed once, gone when asked, and never in the way."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchoffload
from head_models import WIDTH, Head, Holder, hook_count, name_of, train
from torchoffload import NoOpManager, OffloadActivations
from torchoffload._pytorch.hook_stack import innermost, top_pack_hook


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert innermost() is None
    assert top_pack_hook() is None


def test_only_the_head_is_exempt(offload):
    head, body = Head(), Head()
    model = Holder(inner=body, lm_head=head)
    train(model, offload(model))
    assert body.hooks == ["pack"]
    assert head.hooks == ["noop_pack"]


def test_what_the_head_saves_never_reaches_the_context(offload):
    model = Holder(lm_head=Head())
    context = offload(model)
    torchoffload.reset_stats()
    train(model, context)
    handles_with_exemption = torchoffload.stats().handles
    context.remove_head_hooks()
    torchoffload.reset_stats()
    train(model, context)
    assert 0 < handles_with_exemption < torchoffload.stats().handles


def test_gradients_are_the_same(offload):
    model = Holder(lm_head=Head())
    expected = train(model, NoOpManager())
    for seen, wanted in zip(train(model, offload(model)), expected, strict=True):
        assert torch.equal(seen, wanted)


def test_without_an_open_context_the_hooks_do_nothing(offload):
    head = Head()
    model = Holder(lm_head=head)
    offload(model)
    model(torch.ones(1, WIDTH))
    assert head.hooks == ["none"]


def test_another_contexts_offloading_exempts_the_head_too(offload, tmp_path):
    head = Head()
    model = Holder(lm_head=head)
    offload(model)
    train(model, OffloadActivations(tier="disk", disk_dir=tmp_path))
    assert head.hooks == ["noop_pack"]


def test_inside_noop_manager_the_hooks_push_nothing(offload):
    head = Head()
    model = Holder(lm_head=head)
    with offload(model), NoOpManager():
        before = innermost()
        model(torch.ones(1, WIDTH))
        assert innermost() is before


def test_hooks_of_others_keep_what_the_head_saves(offload):
    # A non-reentrant checkpoint counts what is saved in forward and again in its recomputation: both must see the same.
    head = Head()
    model = Holder(lm_head=head)
    expected = train(model, NoOpManager())
    context = offload(model)
    torch.manual_seed(3)
    x = torch.randn(2, WIDTH, requires_grad=True)
    for backward_inside in (False, True):
        head.hooks.clear()
        x.grad = None
        with context:
            loss = checkpoint(model, x, use_reentrant=False).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        assert head.hooks == ["pack_hook", "pack_hook"]
        gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
        assert all(torch.equal(seen, wanted) for seen, wanted in zip(gradients, expected, strict=True))
        model.zero_grad()


def test_an_exception_in_the_heads_forward_leaves_nothing_behind(offload):
    model = Holder(lm_head=Head(error=ValueError("in the head")))
    context = offload(model)
    with context:
        with pytest.raises(ValueError, match="in the head"):
            model(torch.ones(1, WIDTH))
        assert name_of(top_pack_hook()) == "pack"


def test_an_interrupt_in_the_heads_forward_leaves_nothing_behind(offload):
    # PyTorch runs no forward hook for a BaseException; leaving the context clears up behind it.
    model = Holder(lm_head=Head(error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), offload(model):
        model(torch.ones(1, WIDTH))
    assert top_pack_hook() is None


def test_an_exception_in_another_pre_hook_of_the_head_leaves_nothing_behind(offload):
    def fail(*_):
        raise ValueError("in a pre-hook")

    head = Head()
    model = Holder(lm_head=head)
    with offload(model):
        for prepend in (True, False):
            handle = head.register_forward_pre_hook(fail, prepend=prepend)
            with pytest.raises(ValueError, match="in a pre-hook"):
                model(torch.ones(1, WIDTH))
            handle.remove()
            assert name_of(top_pack_hook()) == "pack"


def test_a_head_that_calls_itself_stays_paired(offload):
    class Recursive(Head):
        def forward(self, x, depth=2):
            y = super().forward(x)
            return self(y, depth - 1) + self(y, depth - 1) if depth else y

    head = Recursive()
    model = Holder(lm_head=head)
    with offload(model):
        model(torch.ones(1, WIDTH))
        assert name_of(top_pack_hook()) == "pack"
    assert head.hooks == ["noop_pack"] * 7


def test_a_context_opened_inside_the_head_is_left_to_itself(offload, tmp_path):
    class Nested(Head):
        def forward(self, x):
            with OffloadActivations(tier="disk", disk_dir=tmp_path):
                return super().forward(x)

    head = Nested()
    model = Holder(lm_head=head)
    train(model, offload(model))
    assert head.hooks == ["pack"]


def test_threads_do_not_see_each_others_heads(offload):
    entered, leave = threading.Event(), threading.Event()

    class Slow(Head):
        def forward(self, x):
            entered.set()
            assert leave.wait(30)
            return super().forward(x)

    slow, other = Holder(lm_head=Slow()), Holder(lm_head=Head())
    worker = threading.Thread(target=train, args=(slow, offload(slow)))
    worker.start()
    assert entered.wait(30)
    assert top_pack_hook() is None
    train(other, offload(other))
    leave.set()
    worker.join()
    assert other.lm_head.hooks == slow.lm_head.hooks == ["noop_pack"]


def test_hooks_are_installed_once(offload):
    model = Holder(lm_head=Head())
    for _ in range(3):
        offload(model)
        offload(nn.DataParallel(model))
    assert hook_count(model.lm_head) == (1, 1, 1)


def test_hooks_are_removed_and_may_come_back(offload):
    model = Holder(lm_head=Head())
    handle = model.lm_head.register_forward_hook(lambda *_: None, always_call=True)
    context = offload(model)
    assert context.remove_head_hooks() == 1
    assert context.remove_head_hooks() == 0
    assert hook_count(model.lm_head) == (0, 1, 1)  # the user's own stays
    train(model, context)
    assert model.lm_head.hooks == ["pack"]
    handle.remove()
    offload(model)
    assert hook_count(model.lm_head) == (1, 1, 1)


def test_a_deep_copy_is_exempt_and_gets_no_second_pair(offload):
    model = Holder(lm_head=Head())
    offload(model)
    twin = copy.deepcopy(model)
    assert twin.lm_head is not model.lm_head
    context = offload(twin)
    assert hook_count(twin.lm_head) == (1, 1, 1)
    train(twin, context)
    assert twin.lm_head.hooks == ["noop_pack"]
    assert model.lm_head.hooks == []
    assert context.remove_head_hooks() == 1
    assert hook_count(model.lm_head) == (1, 1, 1)


def test_a_pickled_model_is_exempt(offload):
    model = Holder(lm_head=Head())
    offload(model)
    twin = pickle.loads(pickle.dumps(model))
    train(twin, offload(twin))
    assert hook_count(twin.lm_head) == (1, 1, 1)
    assert twin.lm_head.hooks == ["noop_pack"]


def test_half_a_pair_is_made_whole(offload):
    # Unpickled hooks keep their old ids, and a hook registered later may take the id, and the place, of one of them.
    model = Holder(lm_head=Head())
    offload(model)
    model.lm_head._forward_pre_hooks.clear()
    offload(model)
    assert hook_count(model.lm_head) == (1, 1, 1)


def test_a_saved_state_does_not_know_of_the_hooks(offload):
    model = Holder(lm_head=Head())
    keys = list(model.state_dict())
    offload(model)
    assert list(model.state_dict()) == keys
    torch.save(model.state_dict(), io.BytesIO())


def test_a_compiled_model_runs_in_one_graph(offload):
    model = Holder(lm_head=nn.Linear(WIDTH, WIDTH))
    expected = train(model, NoOpManager())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    context = offload(compiled)
    for _ in range(2):
        for seen, wanted in zip(train(compiled, context), expected, strict=True):
            assert torch.equal(seen, wanted)


def test_a_compiled_head_is_exempt_from_outside(offload):
    outcome = []
    head = torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager")
    model = Holder(lm_head=head)
    context = offload(model)
    head.register_forward_pre_hook(lambda *_: outcome.append(name_of(top_pack_hook())))
    train(model, context)
    assert outcome == ["noop_pack"]
