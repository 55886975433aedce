"""Every option is checked when the context is made: by name, with what was given and what is allowed."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

import pytest
import torch

import torchoffload
from torchoffload import OffloadActivations, offload_modules
from torchoffload._contexts import options as _options
from torchoffload._contexts.options import OffloadOptions

COUNTS = ("max_fwd_stash_size", "min_offload_size", "budget_bytes", "offload_window_bytes", "reload_window_bytes")
MODULE = torch.nn.Linear(2, 2)


def options_for(**given):
    """What the context understood of `given`."""
    return OffloadActivations(**given).options


def test_defaults_are_those_that_the_docs_tell():
    options = options_for()
    assert options.use_pin_memory
    assert options.use_streams
    assert options.tier == "host"
    assert options.on_full == "keep"
    assert all(getattr(options, name) is None for name in COUNTS)


def test_the_smallest_offload_is_64_kib_on_the_host_and_1_mib_on_disk(tmp_path):
    assert options_for().min_offload_bytes == 64 * 1024
    assert options_for(tier="disk", disk_dir=tmp_path).min_offload_bytes == 1024 * 1024
    assert options_for(min_offload_size=0).min_offload_bytes == 0


def test_the_first_two_positionals_are_torchtunes_and_trls():
    options = OffloadActivations(False, False).options
    assert (options.use_pin_memory, options.use_streams) == (False, False)
    with pytest.raises(TypeError, match="positional"):
        OffloadActivations(True, True, 5, 1024)


@pytest.mark.parametrize(("old", "new"), [("host_budget_bytes", "budget_bytes"), ("on_host_full", "on_full")])
def test_an_option_that_was_renamed_is_told_by_its_new_name(old, new):
    calls = (OffloadActivations, functools.partial(offload_modules, LARGE["model"], "*"))
    for call in (*calls, functools.partial(torchoffload.get_act_offloading_ctx_manager, MODULE)):
        with pytest.raises(TypeError, match=rf"^{old} was renamed {new}"):
            call(**{old: 1})


def test_an_unknown_option_is_named_with_the_one_that_it_resembles():
    with pytest.raises(TypeError, match=r"^OffloadActivations got an unknown option: teir \(did you mean tier\?\)$"):
        OffloadActivations(teir="disk")
    with pytest.raises(TypeError, match="max_stash"):
        OffloadActivations(max_stash=5)
    with pytest.raises(
        TypeError, match=r"^offload_modules got an unknown option: fracton \(did you mean fraction\?\)$"
    ):
        offload_modules(MODULE, "*", fracton=0.5)
    with pytest.raises(TypeError, match=r"^fit got an unknown option: teir \(did you mean tier\?\)$"):
        torchoffload.fit(MODULE, "1GiB", teir="disk")
    with pytest.raises(TypeError, match=r"^fit got an unknown option: block \(did you mean blocks\?\)$"):
        torchoffload.fit(MODULE, "1GiB", block="layers.*")
    with pytest.raises(TypeError, match=r"^get_act_offloading_ctx_manager got .*: warn_if_no_haed \(did you mean warn"):
        torchoffload.get_act_offloading_ctx_manager(MODULE, warn_if_no_haed=False)


@pytest.mark.parametrize("value", ["40GiB", 0.5, None])
def test_an_amount_of_memory_is_refused_in_favour_of_fit(value):
    told = r"takes no memory=\. Call torchoffload\.fit\(model, memory=\.\.\., recompute=False\) instead"
    with pytest.raises(TypeError, match=f"^OffloadActivations {told}"):
        OffloadActivations(model=MODULE, memory=value)
    with pytest.raises(TypeError, match=f"^get_act_offloading_ctx_manager {told}"):
        torchoffload.get_act_offloading_ctx_manager(MODULE, memory=value)
    with pytest.raises(
        TypeError, match=r"^offload_modules takes .*fit\(model, memory=\.\.\., blocks=modules, recompute"
    ):
        offload_modules(MODULE, "*", memory=value)


@pytest.mark.parametrize("name", ["use_pin_memory", "use_streams"])
def test_a_model_in_the_first_places_is_told_where_it_belongs(name):
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got a Linear; did you mean model=model\\?$"):
        OffloadActivations(**{name: MODULE})


LARGE = {
    "model": torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(40))),
    "tensor": torch.zeros(2, 1000),
    "list": [torch.zeros(1000)] * 20,
    "text": "x" * 10_000,
    "number": 10**1000,
}
TAKEN = [
    *(
        (name, lambda value, name=name: OffloadActivations(**{name: value}))
        for name in ("use_pin_memory", "tier", "disk_dir", "on_full", *COUNTS)
    ),
    *(
        (name, lambda value, name=name: offload_modules(MODULE, "*", **{name: value}))
        for name in ("fraction", "keep_last", "only_inputs")
    ),
    ("modules", lambda value: offload_modules(MODULE, [value])),
    ("modules", lambda value: offload_modules(MODULE, functools.partial(lambda *_: False, value))),
    ("enable", lambda value: torchoffload.get_act_offloading_ctx_manager(MODULE, value)),
    ("warn", lambda value: torchoffload.get_act_offloading_ctx_manager(MODULE, warn_if_no_head=value)),
]


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("take", [pytest.param(take, id=name) for name, take in TAKEN])
def test_what_is_large_is_not_printed(kind, take):
    with pytest.raises((TypeError, ValueError)) as raised:
        take(LARGE[kind])
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", ["use_pin_memory", "use_streams"])
@pytest.mark.parametrize("value", [0, 1, None, "yes", 1.0])
def test_switches_take_true_and_false_only(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be True or False, got {re.escape(repr(value))} "):
        OffloadActivations(**{name: value})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, False, 1.0, "1024", b"1", [1], float("nan")])
def test_counts_and_byte_sizes_take_whole_numbers_only(name, value):
    with pytest.raises(
        TypeError, match=rf"^{name} must be a whole number .* got {re.escape(_options.described(value))}$"
    ):
        OffloadActivations(**{name: value})


@pytest.mark.parametrize(("name", "least"), list(zip(COUNTS, (1, 0, 1, 0, 0), strict=True)))
def test_counts_and_byte_sizes_have_a_least_and_a_greatest_value(name, least):
    assert getattr(options_for(**{name: least}), name) == least
    with pytest.raises(ValueError, match=rf"^{name} must be .* of at least {least}, .* got {least - 1}$"):
        OffloadActivations(**{name: least - 1})
    with pytest.raises(ValueError, match=rf"^{name} must be .* at most {2**63 - 1}, got {2**63}$"):
        OffloadActivations(**{name: 2**63})


@pytest.mark.parametrize(
    ("name", "allowed"), [("tier", "'host' or 'disk'"), ("on_full", "'keep' or 'error' or 'disk'")]
)
def test_choices_name_what_is_allowed(name, allowed):
    with pytest.raises(ValueError, match=f"^{name} must be {allowed}, got 'cpu'$"):
        OffloadActivations(**{name: "cpu"})
    with pytest.raises(TypeError, match=rf"^{name} must be {allowed}, got 1 \(int\)$"):
        OffloadActivations(**{name: 1})
    with pytest.raises(TypeError, match=f"^{name} must be {allowed}, got None "):
        OffloadActivations(**{name: None})


def test_the_offload_window_is_given_in_one_way_only():
    with pytest.raises(ValueError, match="max_fwd_stash_size=5 and offload_window_bytes=0"):
        OffloadActivations(max_fwd_stash_size=5, offload_window_bytes=0)


def test_model_is_a_module():
    assert OffloadActivations(model=MODULE).options == OffloadOptions()
    with pytest.raises(TypeError, match=r"^model must be a torch.nn.Module, got type$"):
        OffloadActivations(model=torch.nn.Linear)


def test_disk_dir_belongs_to_a_context_that_uses_a_disk(tmp_path):
    text = r'^disk_dir is for tier="disk" and on_full="disk" only, got .* with tier=\'host\' and on_full=\'keep\'$'
    with pytest.raises(ValueError, match=text):
        OffloadActivations(disk_dir=str(tmp_path))


def test_several_directories_are_kept_in_their_order(tmp_path, monkeypatch):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for options in (options_for(tier="disk", disk_dir=["b", "a"]), options_for(on_full="disk", disk_dir=("b", "a"))):
        assert options.disk_dir == (str(tmp_path / "b"), str(tmp_path / "a"))
        assert type(options)(**options.as_keywords()) == options


@pytest.mark.parametrize("value", [[], ()])
def test_no_directory_at_all_is_told(value):
    with pytest.raises(ValueError, match=r"^disk_dir must name at least one directory"):
        OffloadActivations(on_full="disk", disk_dir=value)


def test_a_directory_named_twice_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"^disk_dir names a directory twice"):
        OffloadActivations(on_full="disk", disk_dir=[tmp_path, str(tmp_path)])


def test_each_of_several_directories_is_checked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^disk_dir '.*/gone' does not exist"):
        OffloadActivations(on_full="disk", disk_dir=[tmp_path, tmp_path / "gone"])


def test_a_budget_of_zero_is_for_a_context_that_goes_on_to_a_disk(tmp_path):
    assert options_for(on_full="disk", disk_dir=tmp_path, budget_bytes=0).budget_bytes == 0
    with pytest.raises(ValueError, match=r"^budget_bytes must be a whole number of bytes of at least 1"):
        OffloadActivations(budget_bytes=0)


def test_what_goes_to_the_disk_cannot_go_on_to_it(tmp_path):
    with pytest.raises(ValueError, match=r'^on_full="disk" is for tier="host"'):
        OffloadActivations(tier="disk", on_full="disk", disk_dir=tmp_path)


def test_disk_dir_defaults_to_that_of_tempfile(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert options_for(tier="disk").disk_dir == str(tmp_path)


def test_disk_dir_is_made_absolute_at_construction(tmp_path, monkeypatch):
    (tmp_path / "spill").mkdir()
    monkeypatch.chdir(tmp_path)
    assert options_for(tier="disk", disk_dir="spill").disk_dir == str(tmp_path / "spill")
    assert options_for(tier="disk", disk_dir=pathlib.Path("spill")).disk_dir == str(tmp_path / "spill")


@pytest.mark.parametrize("value", [1, b"/tmp", [1], ["/tmp", None], True])
def test_disk_dir_is_a_path_or_several(value):
    text = r"^disk_dir must be a path \(str or os.PathLike\), a list or tuple of paths, or None, got "
    with pytest.raises(TypeError, match=text):
        OffloadActivations(tier="disk", disk_dir=value)


@pytest.mark.parametrize("value", ["", "spill\0dir"])
def test_disk_dir_is_a_path_that_can_exist(value):
    with pytest.raises(ValueError, match=r"^disk_dir must be the path of a directory, got "):
        OffloadActivations(tier="disk", disk_dir=value)


def test_a_missing_disk_dir_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^disk_dir '.*/gone' does not exist"):
        OffloadActivations(tier="disk", disk_dir=tmp_path / "gone")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"^disk_dir '.*/link' does not exist"):
        OffloadActivations(tier="disk", disk_dir=tmp_path / "link")


def test_a_file_as_disk_dir_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"^disk_dir '.*/file' is not a directory"):
        OffloadActivations(tier="disk", disk_dir=tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"^disk_dir '.*/file/below' leads through a file"):
        OffloadActivations(tier="disk", disk_dir=tmp_path / "file" / "below")


def test_a_name_too_long_for_a_disk_dir_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"^disk_dir '.*' cannot be used: File name too long"):
        OffloadActivations(tier="disk", disk_dir=tmp_path / ("a" * 300))


def test_a_disk_dir_without_permission_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(_options.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError, match=r"^disk_dir '.*' is not writable"):
        OffloadActivations(tier="disk", disk_dir=tmp_path)


def test_a_disk_dir_below_a_closed_directory_is_told(tmp_path, monkeypatch):
    looked_up = os.stat

    def closed(path, *arguments, **keywords):
        if path == str(tmp_path):
            raise PermissionError(13, "Permission denied")
        return looked_up(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(_options.os, "stat", closed)
        with pytest.raises(PermissionError, match=r"^disk_dir '.*' cannot be looked up"):
            OffloadActivations(tier="disk", disk_dir=str(tmp_path))


def test_a_disk_dir_in_ram_is_warned_of_at_the_users_line(tmp_path, monkeypatch):
    monkeypatch.setattr(_options, "file_system_of", lambda _: "tmpfs")
    with pytest.warns(UserWarning, match="is on tmpfs, which is RAM.*Set disk_dir") as caught:
        OffloadActivations(tier="disk", disk_dir=tmp_path)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_disk_dir_on_a_disk_is_not_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(_options, "file_system_of", lambda _: "ext4")
    with warnings.catch_warnings(action="error"):
        OffloadActivations(tier="disk", disk_dir=tmp_path)


def test_the_file_system_is_read_from_the_kernel():
    assert _options.file_system_of("/proc") == "proc"


def test_options_are_frozen_and_make_equal_options_again(tmp_path):
    options = options_for(tier="disk", disk_dir=tmp_path, min_offload_size=7, on_full="error")
    with pytest.raises(AttributeError):
        options.tier = "host"
    assert OffloadOptions(**options.as_keywords()) == options


def test_the_context_shows_what_was_given(tmp_path):
    assert repr(OffloadActivations()) == "OffloadActivations()"
    assert repr(OffloadActivations(min_offload_size=0)) == "OffloadActivations(min_offload_size=0)"


def test_construction_initialises_no_accelerator():
    script = (
        "import torch, torchoffload\n"
        "def touched(*_, **__): raise AssertionError('CUDA was touched')\n"
        "torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = touched\n"
        "model = torch.nn.Linear(2, 2)\n"
        "torchoffload.OffloadActivations(model=model, offload_window_bytes=0)\n"
        "torchoffload.OffloadActivations(tier='disk')\n"
        "torchoffload.NoOpManager()\n"
        "torchoffload.get_act_offloading_ctx_manager(model, warn_if_no_head=False)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_every_option_is_documented():
    for name in OffloadOptions.__dataclass_fields__:
        assert name in (torchoffload.OffloadActivations.__doc__ or "")
