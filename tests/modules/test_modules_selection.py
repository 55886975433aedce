"""Which modules offload_modules chooses, whatever wraps them, and what it says of bad input."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchoffload
from module_models import Attention, Layer, Mlp, Stack
from torchoffload._modules.selection import choose
from torchoffload._observe import report as _report


def names(model, modules):
    return [each.name for each in choose(model, modules)]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({"first": Mlp(), "second": Mlp()})
        self.shared = Mlp()
        self.again = self.shared


def mixture():
    return nn.ModuleDict({"embed": nn.Embedding(4, 4), "layers": nn.ModuleList(Experts() for _ in range(11))})


@pytest.mark.parametrize(
    ("glob", "count"),
    [
        ("layers.*.experts.*.up", 22),
        ("layers.*.experts.second.up", 11),
        ("layers.?.shared", 10),
        ("layers.[2-4].shared", 3),
        ("layers.1*.shared", 2),
        ("layers.*", 11),
        ("layers", 11),
        ("layers.*.experts", 22),
        ("**.up", 33),
        ("**.experts.**.up", 22),
        ("layers.**.down", 33),
        ("layers.3.again", 1),
        ("embed", 1),
    ],
)
def test_a_glob_goes_level_by_level(glob, count):
    assert len(names(mixture(), glob)) == count


def test_a_dot_is_no_wildcard():
    with pytest.raises(ValueError, match="no module"):
        choose(Stack(), "layers*0")


def test_modules_come_in_the_order_of_the_model():
    assert names(Stack(), ["layers.2.mlp", "layers.0.mlp", "layers.1"]) == ["layers.0.mlp", "layers.1", "layers.2.mlp"]


def test_one_module_by_two_names_is_chosen_once():
    assert names(mixture(), ["layers.3.again", "layers.3.shared"]) == ["layers.3.shared"]


def test_the_model_itself_is_named_by_its_type():
    model = Stack()
    assert names(model, model) == ["Stack"]


class Parallel(nn.Module):
    """As DDP, DataParallel or an engine."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Sharded(nn.Module):
    """As FSDP1."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module


def wrap_layers(model, wrap):
    for index, layer in enumerate(model.layers):
        model.layers[index] = wrap(layer)
    return model


WRAPPED = {
    "DDP": lambda: Parallel(Stack()),
    "DDP and compile": lambda: torch.compile(Parallel(Stack()), backend="eager"),
    "FSDP1 around FSDP1": lambda: Sharded(wrap_layers(Stack(), Sharded)),
    "checkpoint_wrapper": lambda: wrap_layers(Stack(), checkpoint_wrapper),
    "compiled layers": lambda: wrap_layers(Stack(), lambda layer: torch.compile(layer, backend="eager")),
    "all of it": lambda: Parallel(
        Sharded(wrap_layers(Stack(), lambda layer: Sharded(checkpoint_wrapper(torch.compile(layer, backend="eager")))))
    ),
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_names_are_the_authors_whatever_the_wrapping(wrapping):
    model = WRAPPED[wrapping]()
    assert names(model, "layers.*.attention") == [f"layers.{index}.attention" for index in range(3)]
    layers = choose(model, "layers.*")
    assert [each.name for each in layers] == ["layers.0", "layers.1", "layers.2"]
    # By type or by the inner module itself, too, it is the outermost wrapper: that is what the model calls.
    inner = [module for module in model.modules() if isinstance(module, Layer)]
    assert [each.module for each in choose(model, Layer)] == [each.module for each in layers]
    assert [each.module for each in choose(model, inner)] == [each.module for each in layers]
    containers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    assert [each.module for each in layers] == [*containers[0]]


def test_a_module_of_the_authors_that_is_named_module_is_no_wrapper():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Attention()

    model = nn.Sequential(Residual(), Residual())
    assert names(model, "*.module") == ["0.module", "1.module"]
    assert [type(each.module) for each in choose(model, Attention)] == [Attention, Attention]
    assert [type(each.module) for each in choose(model, "*")] == [Residual, Residual]


def test_full_names_match_as_well():
    model = torch.compile(Stack(), backend="eager")
    assert names(model, "_orig_mod.layers.1") == ["layers.1"]


@pytest.mark.parametrize(
    ("modules", "error", "text"),
    [
        ("layer.*", ValueError, "no module of Stack matches 'layer.*'. There are: embed (Linear), layers (ModuleList)"),
        ("layer.*", ValueError, "'**.' for any number of levels"),
        (["layers.0", "layers.9"], ValueError, "matches 'layers.9'"),
        (nn.Conv2d, ValueError, "matches Conv2d"),
        (lambda name, module: False, ValueError, "matches test_bad_selectors"),
        (nn.Linear(2, 2), ValueError, "the Linear that was given is no module of this Stack"),
        ([], ValueError, "modules is empty"),
        (["layers.0", "layers.0"], ValueError, "modules has 'layers.0' twice"),
        ([Attention, Attention], ValueError, "modules has Attention twice"),
        (3, TypeError, "modules must be a name or glob (str), an nn.Module subclass, a module of the model"),
        ([None], TypeError, "got None (NoneType)"),
        (dict, TypeError, "dict is no subclass of nn.Module"),
    ],
    ids=lambda value: None,
)
def test_bad_selectors(modules, error, text):
    with pytest.raises(error, match=re.escape(text.replace("test_bad_selectors", "<lambda>"))):
        torchoffload.offload_modules(Stack(), modules)


def test_what_is_offered_names_each_kind_once():
    with pytest.raises(ValueError, match="no module") as caught:
        choose(mixture(), "nothing")
    assert len(str(caught.value)) < 700
    assert str(caught.value).count("shared (Mlp)") == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fraction": 0}, ValueError, "fraction must be a number above 0 and at most 1, or None for all, got 0"),
        ({"fraction": 1.01}, ValueError, "got 1.01"),
        ({"fraction": float("nan")}, ValueError, "got nan"),
        ({"fraction": True}, TypeError, "got True (bool)"),
        ({"fraction": "0.5"}, TypeError, "got '0.5' (str)"),
        ({"keep_last": -1}, ValueError, "keep_last must be a whole number of modules of at least 0"),
        ({"keep_last": 1.0}, TypeError, "got 1.0 (float)"),
        ({"keep_last": 3}, ValueError, "keep_last=3 of the 3 chosen modules leaves none that moves"),
        ({"only_inputs": 1}, TypeError, "only_inputs must be True or False"),
        ({"min_offload_size": -1}, ValueError, "min_offload_size must be"),
        ({"max_fwd_stash": 5}, TypeError, "max_fwd_stash"),
        ({"tier": "disk", "disk_dir": "/nowhere/at/all"}, FileNotFoundError, "does not exist"),
    ],
    ids=lambda value: None,
)
def test_bad_options(options, error, text):
    model = Stack()
    with pytest.raises(error, match=re.escape(text)):
        torchoffload.offload_modules(model, "layers.*", **options)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        torchoffload.offload_modules("model", "layers.*")


def test_a_module_is_offloaded_by_one_handle_alone(tmp_path):
    model, disk = Stack(), {"tier": "disk", "disk_dir": tmp_path}
    handle = torchoffload.offload_modules(model, "layers.*", **disk)
    with pytest.raises(ValueError, match=r"'layers\.1' is offloaded already.*remove\(\)"):
        torchoffload.offload_modules(model, ["embed", "layers.1"], **disk)
    assert not model.embed._forward_pre_hooks
    handle.remove()
    torchoffload.offload_modules(model, ["embed", "layers.1"], **disk)


def test_keep_last_counts_outermost_modules(tmp_path):
    model, disk = Stack(), {"tier": "disk", "disk_dir": tmp_path}
    handle = torchoffload.offload_modules(model, ["layers.*", "**.mlp"], keep_last=1, **disk)
    assert handle.names == ("layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp")


def test_modules_inside_of_what_is_compiled_are_warned_of(tmp_path):
    disk = {"tier": "disk", "disk_dir": tmp_path}
    model = torch.compile(Stack(), backend="eager")
    with pytest.warns(UserWarning, match=r"3 of 3 chosen modules, such as 'layers\.0\.mlp', are part of a region"):
        torchoffload.offload_modules(model, "**.mlp", **disk)
    in_place = Stack()
    in_place.layers[1].compile(backend="eager")
    with pytest.warns(UserWarning, match=r"1 of 3 chosen modules, such as 'layers\.1\.mlp'"):
        torchoffload.offload_modules(in_place, "**.mlp", **disk)


def test_the_report_tells_modules_of_a_kind_together(tmp_path):
    model = Stack()
    modules = ["layers.*.mlp", "layers.*.attention", "embed"]
    options = {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0, "learn": False}
    handle = torchoffload.offload_modules(model, modules, **options)
    torchoffload.reset_stats()
    assert "by module" not in torchoffload.report()
    for _ in range(2):
        model(torch.ones(16, 32)).backward()
    lines = torchoffload.report().splitlines()
    at = lines.index("  by module of Stack, mean of 2 calls:")
    assert sorted(line.split(" moved")[0].split()[0] for line in lines[at + 1 : at + 4]) == [
        "embed",
        "layers.*.attention",
        "layers.*.mlp",
    ]
    assert any(
        re.match(r"    layers\.\*\.mlp x 3 +\d+\.\d KiB moved, kept 24\.0 KiB: parameter", line) for line in lines
    )
    assert max(len(line) for line in lines) <= 120
    rows = {row.name: row for row in handle.stats()}
    assert rows["layers.0.mlp"].bytes_kept["parameter"] == 2 * 2 * 32 * 32 * 4
    assert rows["layers.0.mlp"].bytes_saved > rows["layers.0.mlp"].bytes_offloaded
    torchoffload.reset_stats()
    assert handle.stats()[0].bytes_saved == 0
    handle.remove()


def test_the_report_shows_the_largest_kinds():
    class Source:
        model_name, calls = "Model", 2

        def stats(self):
            return tuple(
                torchoffload.ModuleStats(
                    name=f"kind_{chr(97 + index)}.{index}.out",
                    records_offloaded=1,
                    bytes_offloaded=index << 21,
                    records_kept={},
                    bytes_kept={"small": 4, "parameter": 8, "marked": 2},
                )
                for index in range(12)
            )

        def forget(self):
            pass

        def call_counts(self):
            return {}

    from torchoffload._observe import module_stats as _module_stats

    source = Source()
    _module_stats.note_source(source)
    lines = _module_stats.module_lines()
    at = lines.index("  by module of Model, mean of 2 calls:")
    assert lines[at + 1].startswith(
        "    kind_l.*.out                     11.0 MiB moved, kept 7 B: parameter 4 B, small 2 B, ..."
    )
    assert lines[at + 9] == "    and 4 more kinds, see stats() of the handle"
    assert len(_report.report().splitlines()) <= 40
