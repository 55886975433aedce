"""The output head's exemption: found wherever it hides, installed once, gone when asked, and never in the way."""

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import torchoffload
from torchoffload import NoOpManager, OffloadActivations, get_act_offloading_ctx_manager
from torchoffload._heads import find_heads
from torchoffload._hook_stack import innermost, top_pack_hook
from torchoffload.integrations import trl

WIDTH = 4


class Head(nn.Linear):
    """A head that looks at the thread's hooks while it runs."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.error = error
        self.hooks: list[str] = []

    def forward(self, x):
        self.hooks.append(name_of(top_pack_hook()))
        if self.error is not None:
            raise self.error
        return super().forward(x)


def name_of(pack_hook):
    """The name of a pack hook: "pack" is that of a context, "noop_pack" that of NoOpManager and of a head."""
    return "none" if pack_hook is None else pack_hook.__name__


class Holder(nn.Module):
    """A body, and children under the names given."""

    def __init__(self, **children) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        x = F.gelu(self.body(x))
        for name, child in self.named_children():
            if name != "body":
                x = child(x)
        return x


class WithOutputEmbeddings(Holder):
    def get_output_embeddings(self):
        return self.unusual_name


class RaisesOutputEmbeddings(Holder):
    def get_output_embeddings(self):
        raise NotImplementedError("this model has none")

    @property
    def output(self):
        raise RuntimeError("not built yet")


class TiedHead:
    """As torchtune's TiedLinear: callable, but no module; its `linear` runs, with another's weight."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hooks = []

        def forward(self, x, weight):
            self.hooks.append(name_of(top_pack_hook()))
            return F.linear(x, weight)

    def __init__(self, tied: nn.Linear) -> None:
        self.tied = tied
        self.linear = TiedHead.Linear()

    def __call__(self, x):
        return self.linear(x, self.tied.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.output = TiedHead(self.body)

    def forward(self, x):
        return self.output(F.gelu(self.body(x)))


def peft_like(head):
    base = Holder(model=Holder(lm_head=head))
    peft = Holder(base_model=base)
    peft.peft_config = {"default": object()}
    return peft


def chunked(head):
    return Holder(output=nn.ModuleList([head]))


MODELS = {
    "output": lambda head: Holder(output=head),
    "lm_head": lambda head: Holder(lm_head=head),
    "head": lambda head: Holder(head=head),
    "get_output_embeddings": lambda head: WithOutputEmbeddings(unusual_name=head),
    "raising get_output_embeddings": lambda head: RaisesOutputEmbeddings(lm_head=head),
    "decoder": lambda head: Holder(decoder=Holder(output=head)),
    "language_model": lambda head: Holder(language_model=Holder(lm_head=head)),
    "model": lambda head: Holder(model=Holder(lm_head=head)),
    "text_model": lambda head: Holder(text_model=Holder(head=head)),
    "nested twice": lambda head: Holder(model=Holder(language_model=Holder(lm_head=head))),
    "PEFT": peft_like,
    "DataParallel": lambda head: nn.DataParallel(Holder(lm_head=head)),
    "compiled": lambda head: torch.compile(Holder(lm_head=head), backend="eager"),
    "FSDP1": lambda head: Holder(_fsdp_wrapped_module=Holder(lm_head=head)),
    "checkpoint wrapper": lambda head: checkpoint_wrapper(Holder(lm_head=head)),
    "PEFT in DataParallel": lambda head: nn.DataParallel(peft_like(head)),
    "compiled PEFT": lambda head: torch.compile(peft_like(head), backend="eager"),
}


@pytest.fixture
def offload(tmp_path):
    """Makes the factory's context on the disk tier: it needs no accelerator."""

    def make(model, **options):
        chosen = {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0} | options
        return get_act_offloading_ctx_manager(model, **chosen)

    return make


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert innermost() is None
    assert top_pack_hook() is None


def train(model, context):
    """Gradients of one step with forward inside `context`."""
    torch.manual_seed(3)
    x = torch.randn(2, WIDTH, requires_grad=True)
    with context:
        loss = model(x).square().sum()
    loss.backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_found(name):
    head = Head()
    assert find_heads(MODELS[name](head)) == [head]


def test_a_tied_head_is_found_by_its_linear(offload):
    model = Tied()
    assert find_heads(model) == [model.output.linear]
    context = offload(model)
    train(model, context)
    assert model.output.linear.hooks == ["noop_pack"]
    assert context.remove_head_hooks() == 1


def test_every_head_in_a_container_is_found():
    heads = [Head(), Head()]
    assert find_heads(Holder(output=nn.ModuleList(heads))) == heads
    assert find_heads(Holder(output=nn.ModuleDict({"a": heads[0], "b": heads[1]}))) == heads


def test_the_outermost_level_with_a_head_wins():
    outer = Head()
    assert find_heads(Holder(lm_head=outer, model=Holder(lm_head=Head()))) == [outer]


def test_a_model_that_holds_itself_is_searched_once():
    model = Holder()
    object.__setattr__(model, "model", model)
    assert find_heads(model) == []


def test_base_model_counts_for_peft_only():
    # A Hugging Face model's base_model is its body, which has no business with the head's exemption.
    assert find_heads(Holder(base_model=Holder(lm_head=Head()))) == []


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


def hook_count(head):
    return len(head._forward_pre_hooks), len(head._forward_hooks), len(head._forward_hooks_always_called)


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


def test_a_model_without_a_head_is_warned_of_at_the_users_line(tmp_path):
    with pytest.warns(UserWarning, match="no output head was found in Holder.*warn_if_no_head=False") as caught:
        get_act_offloading_ctx_manager(Holder(), tier="disk", disk_dir=tmp_path)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_warning_can_be_turned_off(offload):
    with warnings.catch_warnings(action="error"):
        offload(Holder(), warn_if_no_head=False)
        offload(Holder(lm_head=Head()))


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


def test_turned_off_it_gives_a_context_that_does_nothing(offload):
    model = Holder(lm_head=Head())
    with offload(model, enable_activation_offloading=False):
        assert top_pack_hook() is None
    assert hook_count(model.lm_head) == (0, 0, 0)


def test_turned_off_it_leaves_the_hooks_of_others_alone(tmp_path):
    model = Holder(lm_head=Head())
    with OffloadActivations(tier="disk", disk_dir=tmp_path), get_act_offloading_ctx_manager(model, False):
        assert name_of(top_pack_hook()) == "pack"


def test_the_factory_refuses_what_is_no_model():
    with pytest.raises(TypeError, match=r"^model must be a torch.nn.Module, got OffloadActivations$"):
        get_act_offloading_ctx_manager(OffloadActivations())


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_factorys_switches_take_true_and_false_only(value):
    model = Holder(lm_head=Head())
    with pytest.raises(TypeError, match=r"^enable_activation_offloading must be True or False.*integrations\.trl"):
        get_act_offloading_ctx_manager(model, value)
    with pytest.raises(TypeError, match=r"^warn_if_no_head must be True or False"):
        get_act_offloading_ctx_manager(model, warn_if_no_head=value)
    with pytest.raises(TypeError, match=r"^warn_if_no_head must be True or False"):
        trl.get_act_offloading_ctx_manager(model, warn_if_no_head=value)


def test_trls_order_fails_loudly():
    with pytest.raises(TypeError, match=r"4 more positional arguments.*torchoffload\.integrations\.trl"):
        get_act_offloading_ctx_manager(Holder(lm_head=Head()), True, True, 1024, 5, True)


def test_trls_function_has_trls_signature(tmp_path):
    model = Holder(lm_head=Head())
    context = trl.get_act_offloading_ctx_manager(model, False, False, 2048, 3, False, tier="disk", disk_dir=tmp_path)
    options = context.options
    assert (options.use_pin_memory, options.use_streams) == (False, False)
    assert (options.min_offload_size, options.max_fwd_stash_size) == (2048, 3)
    defaults = trl.get_act_offloading_ctx_manager(model=model).options
    assert (defaults.min_offload_size, defaults.max_fwd_stash_size) == (1024, 5)
    assert hook_count(model.lm_head) == (1, 1, 1)
    train(model, context)
    assert model.lm_head.hooks == ["noop_pack"]
