"""The command line of ``python -m torchoffload.estimate``."""

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchoffload._estimate.cards import CARDS, Card, find_card
from torchoffload._estimate.estimate import estimate
from torchoffload._estimate.optimizers import OPTIMIZERS

__all__ = ["main"]

_EPILOG = """\
MODEL is one of
  the directory or the config.json of a Hugging Face model, or a model's name there, which downloads its config.json:
      python -m torchoffload.estimate ./config.json --gpu "RTX 4090" --batch 1 --sequence 4096
  module:function, a function that returns the model, or a tuple of it and its inputs. It is called under
  torch.device("meta"), with batch= and sequence= if it takes them. Inputs are a tuple, a dict, or one tensor:
      python -m torchoffload.estimate my_package.models:build --gpu A100 --batch 8
"""


class _Problem(Exception):
    """Something that the user can put right."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchoffload.estimate",
        description="Estimate what a training step takes in memory and time on a card. Needs no GPU and no weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what is trained; see below")
    parser.add_argument("--gpu", default="RTX 4090", help="a card: %(default)s by default; --list names all")
    parser.add_argument("--batch", type=_count, default=1, help="sequences, or samples: %(default)s by default")
    parser.add_argument("--sequence", type=_count, default=4096, help="tokens of a sequence: %(default)s by default")
    parser.add_argument("--dtype", default=None, help="of the weights; by default bfloat16 for a config, else as built")
    parser.add_argument("--autocast", default=None, metavar="DTYPE", help="forward runs under autocast to it")
    parser.add_argument("--optimizer", default="adamw", help="a name, or bytes for each parameter; --list names all")
    parser.add_argument("--memory", default=None, help='what the step may take, as in "20GiB"; by default the card\'s')
    parser.add_argument("--keep-gradients", action="store_true", help="gradients are kept between steps")
    parser.add_argument("--tflops", type=float, help="the card's dense rate in bfloat16, in place of a data sheet's")
    parser.add_argument("--bandwidth", type=float, help="the bandwidth of its memory in GB/s")
    parser.add_argument("--link", type=float, help="the rate of its link to pinned host memory in GB/s, one direction")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, and milliseconds")
    parser.add_argument("--list", action="store_true", help="list the cards and the optimizers, and end")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Print an estimate. This is the command ``python -m torchoffload.estimate``.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments of the command line. Default: those of the process.

    Returns
    -------
    int
        The exit status: 0, or 2 with a message if the arguments are wrong or the model cannot be estimated.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.list:
        print(_list())
        return 0
    if given.model is None:
        parser.error("MODEL is missing: a Hugging Face config, or module:function")
    try:
        model, args, kwargs = _made(given)
        found = estimate(
            model,
            *args,
            gpu=_card(given),
            optimizer=_number_or_name(given.optimizer),
            dtype=given.dtype,
            autocast=given.autocast,
            memory=given.memory,
            keep_gradients=given.keep_gradients,
            **kwargs,
        )
    except (_Problem, TypeError, ValueError, RuntimeError) as problem:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict(), indent=2) if given.json else found)
    return 0


def _list() -> str:
    lines = [f"{'card':<14}{'bf16 TFLOP/s':>13}{'memory GiB':>12}{'GB/s':>7}{'link GB/s':>11}  source"]
    lines += [
        f"{card.name:<14}{card.half_tflops:>13g}{card.memory_gib:>12g}{card.bandwidth_gb_per_s:>7g}"
        f"{card.link_gb_per_s:>11g}  {card.source}"
        for card in CARDS
    ]
    return "\n".join([*lines, "", f"optimizers: {', '.join(OPTIMIZERS)}, or the bytes for each parameter"])


def _card(given: argparse.Namespace) -> Card:
    from dataclasses import replace

    card = find_card(given.gpu)
    own = {
        name: value
        for name, value in (
            ("half_tflops", given.tflops),
            ("bandwidth_gb_per_s", given.bandwidth),
            ("link_gb_per_s", given.link),
        )
        if value is not None
    }
    return replace(card, **own, source="the command line") if own else card


def _number_or_name(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _made(given: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    is_path = os.path.exists(given.model)
    if ":" in given.model and not is_path:
        return _built(given)
    return _from_config(given)


def _built(given: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    module_name, _, function_name = given.model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _Problem(f"no module {error.name!r}, which {given.model!r} needs") from None
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        raise _Problem(f"{module_name} has no function {function_name!r}")
    taken = inspect.signature(function).parameters
    wanted = {name: value for name, value in (("batch", given.batch), ("sequence", given.sequence)) if name in taken}
    with torch.device("meta"):
        made = function(**wanted)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, nn.Module):
        raise _Problem(
            f"{given.model} must return a torch.nn.Module, or one and its inputs, got {type(model).__name__}"
        )
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, inputs if isinstance(inputs, tuple) else (inputs,), {}


def _from_config(given: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    try:
        import transformers
    except ModuleNotFoundError:
        raise _Problem("a config of Hugging Face is read by transformers: pip install transformers") from None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(given.model)
    except (OSError, ValueError) as error:
        raise _Problem(f"no config of Hugging Face, and no module:function: {given.model!r}: {error}") from None
    config.use_cache = False
    with torch.device("meta"):
        model = _language_model(transformers, config)
        tokens = torch.zeros(given.batch, given.sequence, dtype=torch.long)
    if given.dtype is None:
        given.dtype = "float32" if given.autocast else "bfloat16"
    return model.train(), (), {"input_ids": tokens, "labels": tokens}


def _language_model(transformers: Any, config: Any) -> nn.Module:
    """Return a model that takes tokens and labels, of the first kind that the config is one of."""
    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"):
        try:
            return getattr(transformers, name).from_config(config)  # type: ignore[no-any-return]
        except ValueError:
            continue
    raise _Problem(
        f"{type(config).__name__} is no language model, whose inputs would be tokens: write a function that builds it "
        "and its inputs, and give module:function"
    )
