"""test_option_names.py: an option has one name, from the documents through Python down to the C++ core."""

import ast
import inspect
import pydoc
import re
from dataclasses import fields
from typing import Unpack, get_type_hints

import torchoffload
from places import ROOT
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords, MovingKeywords
from torchoffload._contexts.options import OffloadOptions, keywords_for_core
from torchoffload._fit.model.options import FitKeywords, FitOptions

OPTIONS = {field.name for field in fields(OffloadOptions)}
OF_MODULES = {"fraction", "only_inputs"}  # what offload_modules tells the core of; the rest it carries out by itself
SOURCES = "".join(path.read_text() for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in {".h", ".cpp"})


def members_of(struct: str) -> set[str]:
    """The data members of a struct of the core; its functions have parentheses."""
    body = re.search(rf"\nstruct {struct} \{{\n(.*?)\n\}};", SOURCES, flags=re.DOTALL)
    assert body is not None, f"the core has no struct {struct}"
    return set(re.findall(r"^  [\w:<>]+ (\w+)(?: = [^;()]+)?;", body[1], flags=re.MULTILINE))


def test_a_context_takes_the_options_by_their_names():
    parameters = set(inspect.signature(torchoffload.OffloadActivations).parameters)
    assert parameters - {"model"} == OPTIONS


def test_the_core_is_given_the_options_by_their_names():
    assert set(keywords_for_core(OffloadOptions())) == OPTIONS
    stub = ast.parse((ROOT / "src/torchoffload/_C.pyi").read_text())
    (context,) = (node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Context")
    (init,) = (node for node in context.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert {argument.arg for argument in init.args.kwonlyargs} - {"warn"} == OPTIONS


def test_the_core_reads_the_options_by_their_names():
    assert set(re.findall(r'\bgiven(?:, |\[)"(\w+)"', SOURCES)) - {"warn"} == OPTIONS


def test_the_core_keeps_the_options_under_their_names():
    windows = members_of("WindowOptions")
    assert windows == {"offload_window_bytes", "max_fwd_stash_size", "reload_window_bytes"}
    assert (members_of("ContextOptions") - {"windows"}) | windows == OPTIONS | OF_MODULES


def test_offload_modules_names_its_options_as_the_core_does():
    assert set(inspect.signature(torchoffload.offload_modules).parameters) >= OF_MODULES


def test_help_lists_the_options_of_each_function_by_name():
    of_fit = {"blocks", "memory", "model"} | FitKeywords.__optional_keys__ | MovingKeywords.__optional_keys__
    for function, names in (
        (torchoffload.fit, of_fit),
        (torchoffload.offload_modules, {"model", "modules"} | ModuleKeywords.__optional_keys__),
        (
            torchoffload.get_act_offloading_ctx_manager,
            {"model", "enable_activation_offloading", "warn_if_no_head"} | OPTIONS,
        ),
    ):
        shown = inspect.signature(function)
        assert set(shown.parameters) == names
        for name in OPTIONS & names:
            assert shown.parameters[name].default == OffloadOptions.__dataclass_fields__[name].default
            assert f"{name}: " in pydoc.render_doc(function)


def test_the_options_of_fit_are_those_that_it_checks():
    checked = {field.name for field in fields(FitOptions)}
    assert checked - {"memory", "moving"} == FitKeywords.__optional_keys__
    defaults = {name: field.default for name, field in FitOptions.__dataclass_fields__.items()}
    shown = inspect.signature(torchoffload.fit).parameters
    assert {name: shown[name].default for name in FitKeywords.__optional_keys__ | {"memory"}} == {
        name: defaults[name] for name in FitKeywords.__optional_keys__ | {"memory"}
    }


def test_every_option_is_documented_by_its_name():
    documented = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE)
    assert set(documented) >= OPTIONS | OF_MODULES
    assert "model" in documented


def test_editors_and_type_checkers_know_the_options_by_name_and_type():
    taken = get_type_hints(torchoffload.OffloadActivations.__init__)
    checked = get_type_hints(OffloadOptions)
    assert {name: taken[name] for name in OPTIONS} == {name: checked[name] for name in OPTIONS}
    assert get_type_hints(ContextKeywords) == {name: checked[name] for name in OPTIONS}
    for function in (torchoffload.get_act_offloading_ctx_manager, torchoffload.offload_modules):
        assert function.__annotations__["options"] == Unpack[ContextKeywords]
    of_modules = get_type_hints(torchoffload.offload_modules)
    added = get_type_hints(ModuleKeywords).keys() - OPTIONS
    assert added == OF_MODULES | {"keep_last"}
    assert {name: get_type_hints(ModuleKeywords)[name] for name in added} == {name: of_modules[name] for name in added}
