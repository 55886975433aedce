"""The programs of docs/with-*.md, each with a tiny model in place of the one that it names."""

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run
from places import DOCS
from trainings import skip_for, tiny_llama

LIBRARIES = {
    "with-grpo.md": ("trl", "peft", "datasets"),
    "with-sentence-transformers.md": ("sentence_transformers", "sklearn", "datasets"),
    "with-diffusers.md": ("diffusers",),
}
skip_for([name for names in LIBRARIES.values() for name in names if importlib.util.find_spec(name) is None])

from words import sentence, tokenizer  # noqa: E402

# Options for a CPU and a tiny model: the disk tier, small tensors move, and an amount of memory that needs a plan.
ON_A_CPU = 'tier="disk", min_offload_size=0, learn=False, offload_window_bytes=0, reload_window_bytes=0'
PLANNED = 'memory="1MiB", on_unfit="warn", recompute=False, tier="disk", min_offload_size=0'
DENOISER = """{
    "sample_size": 8, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16, "attention_head_dim": 8,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64,
}"""


def replaced(program: str, *pairs: tuple[str, str]) -> str:
    """The program with each first text, which has to be in it, in the place of which the second one comes."""
    for theirs, ours in pairs:
        assert theirs in program, theirs
        program = program.replace(theirs, ours)
    return program


def small_llama(directory: Path, *, is_encoder: bool = False) -> str:
    model = tiny_llama(Run(Device("disk", None), stock=True, context=None))
    (model.model if is_encoder else model).save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    return repr(str(directory / "model"))


def grpo(program: str, directory: Path) -> str:
    return replaced(
        program,
        ('"Qwen/Qwen3-0.6B"', small_llama(directory)),
        ('f"Count to {number}."', "sentence(number, 5)"),
        ("max_completion_length=64", "max_completion_length=8, use_cpu=True, bf16=False, save_strategy='no'"),
        ("OffloadActivationsCallback()", f"OffloadActivationsCallback({ON_A_CPU})"),
    )


def sentence_transformers(program: str, directory: Path) -> str:
    return replaced(
        program,
        ('"sentence-transformers/all-MiniLM-L6-v2"', small_llama(directory, is_encoder=True) + ", device='cpu'"),
        ('f"What is {n} plus {n}?"', "sentence(n, 6)"),
        ('f"It is {2 * n}."', "sentence(n + 1, 7)"),
        ('report_to="none"', 'report_to="none", use_cpu=True, save_strategy="no"'),
        ("OffloadActivationsCallback()", f"OffloadActivationsCallback({ON_A_CPU})"),
    )


def diffusers(program: str, _: Path) -> str:
    config = re.search(r"UNet2DConditionModel\.load_config\(.*?\)", program)
    assert config
    return replaced(
        program,
        (config[0], DENOISER),
        ("4, 128, 128", "4, 8, 8"),
        ("2, 77, 2048", "2, 6, 16"),
        ("2, 1280", "2, 16"),
        ('memory="40GiB"', PLANNED),
        ("print(fitted.report())", "fitted.remove()"),
    )


TINY: dict[str, Callable[[str, Path], str]] = {
    "with-grpo.md": grpo,
    "with-sentence-transformers.md": sentence_transformers,
    "with-diffusers.md": diffusers,
}


def printed(program: str) -> str:
    """What a program prints that begins from the same random numbers each time; trainers print other things as well."""
    torch.manual_seed(0)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, "the program of the page", "exec"), {"__name__": "__main__", "sentence": sentence})
    (losses,) = re.findall(r"^\[.*\]$", out.getvalue(), flags=re.MULTILINE)
    return losses


@pytest.mark.filterwarnings("ignore:.*too little:UserWarning")
@pytest.mark.parametrize("page", LIBRARIES)
def test_the_program_of_a_page_prints_the_same_losses(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    program = TINY[page](shown, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    stock = printed(program)
    assert len(stock) > len("[0.1, 0.2]")
    monkeypatch.delenv("TORCHOFFLOAD_DISABLE")
    before = torchoffload.stats().bytes_offloaded
    assert printed(program) == stock
    assert torchoffload.stats().bytes_offloaded > before
