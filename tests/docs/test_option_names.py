"""test_option_names.py: an option has one name, from the documents through Python down to the C++ core."""

import ast
import inspect
import re
from dataclasses import fields
from typing import Unpack, get_type_hints

import torchoffload
from places import ROOT
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._contexts.options import OffloadOptions, keywords_for_core

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
    assert parameters - {"model", "memory", "unknown"} == OPTIONS


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
