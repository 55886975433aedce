"""docs/from-*.md: what others document holds here, and each test that these pages name exists."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import Block, TinyGpt, tokens_and_labels, update
from pages import missing_tests, named_tests, tables
from places import DOCS
from torchoffload._contexts.options import OffloadOptions
from torchoffload.integrations import trl

PAGES = sorted(path.name for path in DOCS.glob("from-*.md"))
DROP_INS = {
    "from-torchtune.md": {
        "use_pin_memory",
        "use_streams",
        "max_fwd_stash_size",
        "min_offload_size",
        "enable_activation_offloading",
    },
    "from-trl.md": {"use_pin_memory", "use_streams", "min_offload_size", "max_fwd_stash_size", "warn_if_no_head"},
}


def rows_of(page: str) -> list[list[str]]:
    return tables(page, "Option by option")


def test_there_is_a_page_for_each_library_and_each_is_in_the_list():
    listed = (DOCS / "migration.md").read_text()
    assert len(PAGES) >= 10
    assert [page for page in PAGES if f"({page})" not in listed] == []


@pytest.mark.parametrize("page", PAGES)
def test_each_page_has_rows_and_the_tests_that_it_names_exist(page: str):
    assert len(rows_of(page)) >= 2
    assert missing_tests(page) == []


def test_the_pages_name_tests():
    assert sum(len(named_tests(page)) for page in PAGES) > 50


@pytest.mark.parametrize("page", DROP_INS)
def test_each_option_of_a_drop_in_has_a_row(page: str):
    theirs = " ".join(row[0] for row in rows_of(page))
    assert {name for name in DROP_INS[page] if f"`{name}" not in theirs} == set()


@pytest.mark.parametrize("page", DROP_INS)
def test_each_row_of_a_drop_in_names_a_test(page: str):
    rows = rows_of(page)
    assert len(rows) > 10
    assert [row[0] for row in rows if "`test_" not in row[-1]] == []


def test_each_option_of_ours_that_a_page_names_exists():
    known = set(OffloadOptions.__dataclass_fields__)
    for function in (
        torchoffload.OffloadActivations,
        torchoffload.offload_modules,
        torchoffload.get_act_offloading_ctx_manager,
        torchoffload.selective_checkpoint_context_fn,
    ):
        known |= set(inspect.signature(function).parameters)
    rows = [row for page in (*DROP_INS, "from-megatron.md") for row in rows_of(page)]
    named = {name for row in rows for name in re.findall(r"`(\w+)=[^`]*`", row[1])}
    assert named - known == set()


# ---- torchtune ----


def drop_in(run: Run, device: Device, model: nn.Module, factory: Any = None) -> Any:
    """The factory's context with the device's options; an empty one for a stock run."""
    factory = factory or torchoffload.get_act_offloading_ctx_manager
    options = device.context().options.as_keywords()
    return run.offload() if run.stock else factory(model, **options)


def test_torchtunes_call_of_the_factory_is_ours(tmp_path):
    model = nn.ModuleDict({"output": nn.Linear(4, 4)})
    options = {"tier": "disk", "disk_dir": tmp_path}
    by_place = torchoffload.get_act_offloading_ctx_manager(model, True, **options)
    by_name = torchoffload.get_act_offloading_ctx_manager(model=model, enable_activation_offloading=True, **options)
    assert by_place.options == by_name.options
    assert by_place.remove_head_hooks() == 1


def test_a_recipes_loop_with_gradient_accumulation(device_under_test: Device):
    """One context for the whole run, entered around the model, with loss and backward outside."""

    def program(run: Run):
        model = run.module(TinyGpt)
        context = drop_in(run, device_under_test, model)
        for _ in range(2):
            for _ in range(3):
                tokens, labels = tokens_and_labels(run)
                with context:
                    x = model.embedding(tokens)
                    for block in model.blocks:
                        x = block(x)
                    logits = model.head(model.norm(x))
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 3
                del logits
                loss.backward()
            run.check(loss=loss, step=model)
            update(model)

    # The head's input is that of no other operator, and it is exempt.
    assert_same_gradients(program, device=device_under_test)


class Multimodal(nn.Module):
    """An encoder, and a decoder whose head is in it: torchtune's DeepFusionModel refuses to be offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.GELU())
        self.decoder = nn.ModuleDict({"block": Block(), "output": nn.Linear(32, 16)})

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.decoder["output"](self.decoder["block"](self.encoder(patches)))


def test_a_multimodal_model_whose_head_is_in_its_decoder(device_under_test: Device):
    def program(run: Run):
        model = run.module(Multimodal)
        context = drop_in(run, device_under_test, model)
        for _ in range(2):
            with context:
                out = model(run.tensor(2, 9, 12))
            out.square().mean().backward()
            run.check(step=model)
            update(model)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.8)


# ---- TRL ----


def test_trls_context_encloses_backward(device_under_test: Device):
    """`training_step` of its trainers runs forward and backward inside; some steps never run their backward."""

    def program(run: Run):
        model = run.module(lambda: TinyGpt(depth=2))
        context = drop_in(run, device_under_test, model, trl.get_act_offloading_ctx_manager)
        for step in range(4):
            with context:
                loss = model(*tokens_and_labels(run))
                if step != 1:
                    loss.backward()
            run.check(loss=loss, step=model)
            update(model)
            del loss

    assert_same_gradients(program, device=device_under_test)


class FusedLoss(torch.autograd.Function):
    """As fused linear losses do: gradients are computed in forward, saved, and scaled in place in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        probabilities = (x @ weight.t()).softmax(-1)
        loss = -probabilities.gather(1, labels[:, None]).log().mean()
        probabilities[torch.arange(len(labels), device=labels.device), labels] -= 1
        probabilities /= len(labels)
        ctx.save_for_backward(probabilities @ weight, probabilities.t() @ x)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        d_x, d_weight = ctx.saved_tensors
        return d_x.mul_(gradient), d_weight.mul_(gradient), None


def test_a_fused_loss_that_saves_its_gradients(device_under_test: Device):
    """TRL leaves modules alone whose name has "liger" in it; here they move as anything else, and come out right."""

    def program(run: Run):
        model = run.module(TinyGpt)
        for _ in range(3):
            tokens, labels = tokens_and_labels(run)
            with run.offload():
                x = model.embedding(tokens)
                for block in model.blocks:
                    x = block(x)
                loss = 3 * FusedLoss.apply(model.norm(x).flatten(0, 1), model.head.weight, labels.flatten())
            loss.backward()
            run.check(loss=loss, step=model)
            update(model)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("name", ["ln_f", "final_layer_norm"])
def test_a_final_norm_is_no_head(name: str, tmp_path):
    model = nn.ModuleDict({"body": nn.Linear(4, 4), name: nn.LayerNorm(4)})
    with pytest.warns(UserWarning, match="no output head was found"):
        trl.get_act_offloading_ctx_manager(model, tier="disk", disk_dir=tmp_path)


# ---- those that move a checkpointed block's inputs alone ----


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_around_checkpointed_blocks_their_inputs_alone_move(device_under_test: Device, reentrant: bool):
    """What Unsloth, DeepSpeed's cpu_checkpointing and transformers' offload of checkpoint inputs do."""
    depth, shape = 3, (2, 16, 32)

    def program(run: Run):
        blocks = run.module(lambda: nn.ModuleList(Block() for _ in range(depth)))
        x = run.leaf(*shape)
        with run.offload():
            hidden = x
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        hidden.sum().backward()
        run.check(step=blocks, grad=x.grad)

    input_bytes = 4 * torch.Size(shape).numel()
    assert_same_gradients(program, device=device_under_test, moved_bytes=depth * input_bytes)


# ---- those that choose modules ----


class MegatronLayer(nn.Module):
    """A layer whose parts have the names of Megatron's."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attention = nn.ModuleDict(
            {
                "linear_qkv": nn.Linear(width, 3 * width),
                "core_attention": Core(),
                "linear_proj": nn.Linear(width, width),
            }
        )
        self.pre_mlp_layernorm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(width, 4 * width), "linear_fc2": nn.Linear(4 * width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention, mlp = self.self_attention, self.mlp
        qkv = attention["linear_qkv"](self.input_layernorm(x))
        x = x + attention["linear_proj"](attention["core_attention"](qkv))
        return x + mlp["linear_fc2"](functional.gelu(mlp["linear_fc1"](self.pre_mlp_layernorm(x))))


class Core(nn.Module):
    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class MegatronModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(MegatronLayer() for _ in range(3))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder["layers"]:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("modules", "count"),
    [
        ("decoder.layers.*.self_attention.core_attention", 3),
        (["decoder.layers.*.self_attention.linear_qkv", "decoder.layers.*.mlp.linear_fc1"], 6),
        (["decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"], 6),
        (["decoder.layers.0", "decoder.layers.1"], 2),
        (nn.LayerNorm, 6),
    ],
    ids=["core_attn", "qkv_linear and fc1", "dense MLP", "cpu_offloading_num_layers=2", "norms by type"],
)
def test_megatrons_modules_by_their_names(device_under_test: Device, modules: Any, count: int):
    options = device_under_test.context().options.as_keywords()

    def program(run: Run):
        model = run.module(MegatronModel)
        if not run.stock:
            assert len(torchoffload.offload_modules(model, modules, **options).names) == count
        for _ in range(3):
            loss = model(run.tensor(2, 16, 32))
            loss.backward()
            run.check(loss=loss, step=model)
            update(model)

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.bytes_offloaded > 0


class FusedAccumulation(torch.autograd.Function):
    """A linear layer that adds its weight's gradient into `main_grad`, of the weight on ctx or of the saved one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, is_on_ctx: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight if is_on_ctx else None
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, saved_weight = ctx.saved_tensors
        weight = saved_weight if ctx.weight is None else ctx.weight
        weight.main_grad.addmm_(gradient.t(), x)
        return gradient @ saved_weight, None, None


def test_a_weights_main_grad_is_read_off_ctx_and_not_off_a_saved_weight(device_under_test: Device):
    def program(run: Run, *, is_on_ctx: bool = True):
        weight = run.parameter(32, 32)
        weight.main_grad = torch.zeros_like(weight)
        x = run.leaf(64, 32)
        with run.offload():
            y = FusedAccumulation.apply(x.exp(), weight, is_on_ctx).square().sum()
        y.backward()
        run.check(grad=x.grad, main_grad=weight.main_grad)

    assert_same_gradients(program, device=device_under_test)
    with device_under_test.scope():
        program(Run(device_under_test, stock=True, context=None), is_on_ctx=False)
        with pytest.raises(AttributeError, match="main_grad"):
            program(Run(device_under_test, stock=False, context=None), is_on_ctx=False)


def test_a_block_is_not_offloaded_twice(tmp_path):
    """FastVideo's review found each layer wrapped twice; a layer of two pipelines is chosen once, or told of."""
    model = TinyGpt()
    options = {"tier": "disk", "disk_dir": tmp_path}
    handle = torchoffload.offload_modules(model, "blocks.*", **options)
    with pytest.raises(ValueError, match="offloaded already"):
        torchoffload.offload_modules(model, Block, **options)
    handle.remove()
    assert torchoffload.offload_modules(model, Block, **options).names == handle.names


def test_a_wrapper_around_each_block_is_one_call(device_under_test: Device):
    """PyTorch's `offload_wrapper`, FastVideo's wrapped forwards and ms-swift's layers: blocks, and no embedding."""
    options = device_under_test.context().options.as_keywords()

    def program(run: Run):
        model = run.module(TinyGpt)
        handle = None if run.stock else torchoffload.offload_modules(model, Block, **options)
        for step in range(4):
            if step == 3 and handle is not None:
                handle.remove()
            loss = model(*tokens_and_labels(run))
            loss.backward()
            run.check(loss=loss, step=model)
            update(model)

    assert_same_gradients(program, device=device_under_test)
