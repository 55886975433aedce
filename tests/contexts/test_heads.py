"""The factory: it finds the output head wherever it hides, says so when it does not, and refuses what is wrong."""

import warnings

import pytest
from torch import nn

from head_models import MODELS, Head, Holder, Tied, hook_count, name_of, train
from torchoffload import OffloadActivations, get_act_offloading_ctx_manager
from torchoffload._contexts.heads import find_heads
from torchoffload._pytorch.hook_stack import top_pack_hook
from torchoffload.integrations import trl


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


def test_a_model_without_a_head_is_warned_of_at_the_users_line(tmp_path):
    with pytest.warns(UserWarning, match="no output head was found in Holder.*warn_if_no_head=False") as caught:
        get_act_offloading_ctx_manager(Holder(), tier="disk", disk_dir=tmp_path)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_warning_can_be_turned_off(offload):
    with warnings.catch_warnings(action="error"):
        offload(Holder(), warn_if_no_head=False)
        offload(Holder(lm_head=Head()))


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
