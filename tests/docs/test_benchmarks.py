"""benchmarks/ as a user runs it, only smaller: train_step.py, its tables and chart, link.py, and peers' packages."""

import importlib
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from places import BENCHMARKS, DOCS, ROOT
from refusals import refusal

TINY = "A:hidden=128,intermediate=256,layers=2,batch=4,tokens=512,heads=4,kv_heads=2,vocabulary=256"
COMMITTED = sorted((BENCHMARKS / "results").glob("*train-step*.json"))
GIB = 1 << 30

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/ as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=dict(os.environ))


# ---- compiled.py ----


def test_compiled_compares_no_gradients_that_stock_does_not_repeat(module: Callable, monkeypatch: pytest.MonkeyPatch):
    compiled = module("compiled")
    model = torch.nn.Linear(2, 2)
    subject = SimpleNamespace(model=model)
    bench = compiled.Bench("", SimpleNamespace(device="cpu"))
    calls = itertools.count()

    def step(_subject: object, _context: object) -> None:
        model.weight.grad, model.bias.grad = torch.full((2, 2), float(next(calls))), torch.ones(2)

    monkeypatch.setattr(bench, "step", step)
    bench.note_gradients(subject, None)
    assert [each is None for each in bench.gradients] == [True, False]
    step(subject, None)
    assert bench.is_same(subject)
    model.bias.grad += 1
    assert not bench.is_same(subject)


# ---- train_step.py on the disk tier ----


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    path = tmp_path_factory.mktemp("benchmark") / "result.json"
    options = ["--offloader", "torchoffload", "save_on_cpu", "torchtune", "--at-memory-of", "save_on_cpu", "torchtune"]
    count = ["--warm-up", "1", "--steps", "2", "--json", str(path)]
    return run("train_step.py", "--tier", "disk", "--workload", TINY, *options, *count), path


@pytest.mark.slow
@needs_transformers
def test_offloaders_take_turns_and_prove_their_gradients(measured: tuple):
    done, path = measured
    assert done.returncode == 0, done.stderr
    runs = json.loads(path.read_text())["results"][TINY]["offloaders"]
    for name in ("none", "torchoffload", "save_on_cpu", "torchoffload@save_on_cpu"):
        row = re.search(rf"^{name} +(\d+) +([\d.]+) .*identical$", done.stdout, re.MULTILINE)
        assert row, f"no row {name} in:\n{done.stdout}"
        timed = [step for step in runs[name]["steps"] if step["phase"] == "timed"]
        assert [step["lineup"] for step in timed] == [0, 0]
        assert {step["loss"] for step in timed} == {runs["none"]["steps"][-1]["loss"]}
        assert all(step["grad_norm"] > 0 for step in timed)
        assert runs[name]["different"] == []
    phases = [step["phase"] for step in runs["torchoffload"]["steps"]]
    assert phases == ["plain"] * 3 + ["first", "warm-up", "timed", "timed"]
    assert [step["phase"] for step in runs["none"]["steps"]] == ["plain"] * 3 + ["warm-up", "timed", "timed"]
    assert re.search(r"^torchoffload / save_on_cpu: [\d.]+ of its time$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@needs_transformers
def test_torchoffload_counts_what_each_step_moved(measured: tuple):
    runs = json.loads(measured[1].read_text())["results"][TINY]["offloaders"]
    for step in runs["torchoffload"]["steps"]:
        assert (step["bytes_out"] > 0) == (step["phase"] != "plain")
    assert "bytes_out" not in runs["save_on_cpu"]["steps"][-1]
    assert runs["torchoffload"]["stats"]["bytes_offloaded"] == runs["torchoffload"]["steps"][-1]["bytes_out"]
    # On a CPU no memory is measured.
    assert runs["torchoffload@save_on_cpu"]["windows"] == {"offload_window_bytes": 0, "reload_window_bytes": 0}


@pytest.mark.slow
@needs_transformers
def test_a_peer_that_cannot_run_says_so_in_its_row_and_ends_nothing(measured: tuple):
    done, _ = measured
    assert re.search(r"^torchtune +cannot run: needs a CUDA device$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^torchoffload@torchtune +cannot run: there is nothing to compare with$", done.stdout, re.MULTILINE
    )


@pytest.mark.slow
@needs_transformers
def test_a_result_names_no_directory_of_the_machine(measured: tuple):
    text = measured[1].read_text()
    assert json.loads(text)["command"].startswith(f"{Path(sys.executable).name} benchmarks/train_step.py --tier disk")
    for directory in (str(ROOT), str(measured[1].parent), sys.prefix):
        assert directory not in text


@pytest.mark.slow
@pytest.mark.cuda
@needs_transformers
def test_on_a_gpu_torchoffload_holds_no_more_than_the_peer_asked_for(tmp_path: Path):
    path = tmp_path / "result.json"
    options = ["--workload", TINY, "--turns", "pairs", "--at-memory-of", "save_on_cpu", "--steps", "2"]
    done = run("train_step.py", *options, "--json", str(path))
    assert done.returncode == 0, done.stderr
    runs = json.loads(path.read_text())["results"][TINY]["offloaders"]
    at_loss = {name: row["steps"][-1]["at_loss_bytes"] for name, row in runs.items()}
    assert at_loss["torchoffload@save_on_cpu"] < at_loss["none"]
    assert all(row["steps"][-1]["peak_bytes"] > 0 for row in runs.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "E"], "no workload 'E': choose from A, B, C, D"),
        (["--workload", "A:layers=x"], "'layers=x' is not FIELD=NUMBER"),
        (["--steps", "0"], "--steps and --warm-up are at least 1"),
        (["--at-memory-of", "torchtune"], "--at-memory-of torchtune: torchtune and torchoffload have to be among"),
        (["--at-memory-of", "none"], "--at-memory-of none: none and torchoffload have to be among"),
        (["--peers", "missing"], "--peers: there is no directory missing"),
        (["--offloader", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(options: list[str], message: str):
    status, errors = refusal("train_step.py", "--tier", "disk", *options)
    assert status == 2
    assert message in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("script", ["train_step.py", "link.py"])
def test_without_a_gpu_a_script_says_that_it_needs_one(script: str):
    done = run(script)
    assert done.returncode != 0
    assert "there is no CUDA device" in done.stderr


@pytest.mark.cuda
def test_the_link_is_measured_through_both_kinds_of_memory(tmp_path: Path):
    path = tmp_path / "link.json"
    done = run("link.py", "--largest-mib", "64", "--json", str(path))
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert {row["memory"] for row in content["rates"]} == {"registered", "pytorch"}
    assert max(row["bytes_per_s"] for row in content["rates"]) > 1e9
    assert len(content["together"]) == (3 if torch.cuda.device_count() > 1 else 0)
    assert run("report.py", str(path)).returncode == 0


# ---- figures ----


def steps(times: list[float], lineup: int, norm: float = 2.0, **more: float) -> list[dict]:
    step = {"phase": "timed", "lineup": lineup, "loss": 1.0, "grad_norm": norm, "at_loss_bytes": 0, "peak_bytes": 0}
    return [step | more | {"ms": ms} for ms in times]


def test_a_ratio_is_of_the_turns_that_both_took(module):
    figures = module("figures")
    ours = {"steps": steps([10, 10, 10], 0) + steps([20, 20, 20], 1)}
    peer = {"steps": steps([40, 40, 40], 1)}
    assert figures.ratio(ours, peer) == 0.5
    assert figures.ratio(peer, ours) == 2
    assert figures.ratio({"steps": steps([80], 2)}, peer) == 2  # no turn in common: all that there is


@pytest.mark.parametrize("norm", [2.1, float("nan")])
def test_a_step_with_another_gradient_norm_is_wrong(module, norm: float):
    figures = module("figures")
    runs = {"none": {"steps": steps([1] * 4, 0), "different": []}}
    runs["trl"] = {"steps": steps([1] * 4, 0, 2.0001) + steps([1], 0, norm), "different": []}
    assert figures.verdict(runs["none"], runs) == "identical"
    assert figures.verdict(runs["trl"], runs) == "identical; WRONG in 1 of 5 steps"
    assert not figures.is_right(runs["trl"], runs)


def test_the_bound_is_the_link_both_ways_or_stocks_time(module):
    figures = module("figures")
    stock = {"steps": steps([500], 0), "saved": {"unique_bytes": 30 * GIB}}
    assert figures.bound_ms(stock, 0) is None  # on a CPU
    stock["link_bytes_per_s"] = {"out": 50 * GIB, "in": 25 * GIB}
    assert figures.bound_ms(stock, 5 * GIB) == pytest.approx(1500)
    assert figures.bound_ms(stock, 29 * GIB) == 500


@pytest.mark.parametrize(
    ("at_loss", "peak", "tried"),
    [
        (lambda _out, _back: 0, lambda _out, _back: 0, [(3200, 3200)]),
        # Something else of 200 is held at the loss, too.
        (lambda _out, back: back + 200, lambda _out, _back: 0, [(3200, 3200), (2950, 2950)]),
        # The peak is forward's: the offload window comes down.
        (lambda _out, back: back, lambda out, _back: out + 2000, [(3200, 3200), (1150, 3200)]),
        # It is backward's: that does not help, and the reload window comes down, too.
        (lambda _out, back: back, lambda _out, back: back + 1000, [(3200, 3200), (2150, 3200), (2150, 2150)]),
        # Nothing helps.
        (lambda _out, _back: 9000, lambda _out, _back: 9000, [(3200, 3200)] + [(0, 0)] * 6),
    ],
)
def test_windows_come_down_until_the_memory_fits(
    module, at_loss: Callable[[int, int], int], peak: Callable[[int, int], int], tried: list[tuple[int, int]]
):
    seen = []

    def bytes_over(offload: int, reload: int) -> tuple[int, int]:
        seen.append((offload, reload))
        return at_loss(offload, reload) - 3200, peak(offload, reload) - 3200

    assert module("turns").search_windows(3200, bytes_over) == tried[-1]
    assert seen == tried


def test_lineups_put_a_peer_beside_stock_and_torchoffload(module):
    turns, offloaders = module("turns"), module("offloaders")
    chosen = ["none", "torchoffload", "torchtune", "trl", "compiled", "compiled_offload"]
    plan = turns.Plan(chosen, ["torchtune"], offloaders.Options(), 1, 1, "auto", 1)
    both = ["none", "torchoffload"]
    own = "torchoffload@torchtune"
    assert turns._lineups(plan, "pairs") == [
        [*both, "torchtune", own],
        [*both, "trl"],
        [*both, "compiled", "compiled_offload"],
    ]
    assert turns._lineups(plan, "all") == [[*both, "torchtune", own, "trl", "compiled", "compiled_offload"]]
    alone = turns._lineups(plan, "none")
    assert alone == [[name] for name in [*both, "torchtune", own, "trl", "compiled", "compiled_offload"]]


def test_a_process_that_dies_is_its_rows_error(module):
    worker, offloaders, workloads = module("worker"), module("offloaders"), module("workloads")
    started = worker.Worker("none", workloads.parse_workload(TINY), offloaders.Options(tier="disk"), 60)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(worker.WorkerFailed, match=r"^failed: the process ended with status -9$"):
        started.call("facts")
    started.stop()


# ---- tables and chart ----


@pytest.mark.slow
@needs_transformers
def test_tables_of_a_fresh_result_and_of_a_committed_one(measured: tuple):
    done = run("report.py", str(COMMITTED[-1]), str(measured[1]))
    assert done.returncode == 0, done.stderr
    assert "| A | torchoffload | " in done.stdout
    assert f"| {TINY} | torchtune | cannot run: needs a CUDA device |" in done.stdout
    assert re.search(rf"^\| {re.escape(TINY)} \| at save_on_cpu's memory \| save_on_cpu \|", done.stdout, re.MULTILINE)


def test_tables_are_rewritten_in_place(tmp_path: Path):
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- table:train_step -->\nold\n<!-- table:end -->\nafter\n")
    for _ in range(2):
        done = run("report.py", str(COMMITTED[-1]), "--into", str(document))
        assert done.returncode == 0, done.stderr
        text = document.read_text()
        assert re.fullmatch(r"before\n<!-- table:train_step -->\n(\|.+\|\n)+<!-- table:end -->\nafter\n", text)
    assert "| A | stock | 278 | 1.00 |" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing\n", "no line <!-- table:NAME -->"),
        ("<!-- table:link -->\n<!-- table:end -->\n", "these results have nothing for the table 'link'"),
        ("<!-- table:train_step -->\nrest\n", "no <!-- table:end --> after <!-- table:train_step -->"),
    ],
)
def test_a_document_without_room_for_a_table_stays_as_it_is(tmp_path: Path, text: str, message: str):
    document = tmp_path / "page.md"
    document.write_text(text)
    status, errors = refusal("report.py", str(COMMITTED[-1]), "--into", str(document))
    assert status == 1
    assert message in errors
    assert document.read_text() == text


def test_what_is_no_result_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    status, errors = refusal("report.py", str(path))
    assert status == 1
    assert "nothing in there is a result" in errors


def test_the_links_rates_become_tables(module):
    link, report = module("link"), module("report")
    rates = [
        {"memory": memory, "size_bytes": size, "way": way, "bytes_per_s": 5e10}
        for memory in ("registered", "pytorch")
        for size in (1 << 16, GIB)
        for way in link.WAYS
    ]
    seconds = {"registered": {"touch": 0.1, "register": 0.2}, "pytorch": {"allocate": 0.8}}
    pinning = [{"memory": memory, "bytes": 2 * GIB, "seconds": parts} for memory, parts in seconds.items()]
    together = [{"way": way, "size_bytes": 1 << 28, "bytes_per_s": [4e10, 3e10]} for way in link.WAYS]
    content = {"hardware": {"device": "a device"}, "rates": rates, "pinning": pinning, "together": together}
    text = link.tables(content)
    assert "64 KiB        50.0    50.0    50.0" in text
    assert "pinning a GiB, registered: 50 ms to touch + 100 ms to register" in text
    assert "2 GPUs at once, both: 70 GB/s (30.0 to 40.0 each)" in text
    tables = report.make_tables([content])
    assert "| 1 GiB | pytorch | 50.0 | 50.0 | 50.0 |" in tables["link"]
    assert "| 256 MiB | registered, 2 GPUs at once | 70 | 70 | 70 |" in tables["link"]
    assert "| registered | 150 | touch 50, register 100 |" in tables["pinning"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_chart_is_the_same_each_time(tmp_path: Path):
    drawn = []
    for name in ("one.svg", "two.svg"):
        done = run("report.py", str(COMMITTED[-1]), "--chart", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]
    assert ">save_on_cpu<" in drawn[0]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_of_fit_is_drawn_from_committed_results(tmp_path: Path):
    """The same file as docs/fit.svg, if it was drawn by the same release of matplotlib."""
    names = ("2026-11-23-h200-fit-A", "2026-11-23-h200-fit-B", "2026-11-24-h200-fit-C")
    results = [str(BENCHMARKS / "results" / f"{name}.json") for name in names]
    done = run("report.py", *results, "--chart", str(tmp_path / "fit.svg"))
    assert done.returncode == 0, done.stderr
    drawn, committed = (path.read_text() for path in (tmp_path / "fit.svg", DOCS / "fit.svg"))
    assert all(f">workload {name}<" in drawn for name in "ABC")
    assert ">1038 ms<" in drawn  # everything moved, on A: above the edge
    if re.findall("Matplotlib v[0-9.]+", drawn) == re.findall("Matplotlib v[0-9.]+", committed):
        assert drawn == committed


# ---- peers' packages ----


def package(directory: Path, name: str, module_path: str, source: str) -> None:
    """A package whose __init__ cannot be imported, as without what it needs."""
    path = directory / module_path
    path.parent.mkdir(parents=True)
    for folder in (directory / name, path.parent):
        (folder / "__init__.py").write_text("raise ImportError('planted')\n")
    path.write_text(source)
    info = directory / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["unpacked", "wheel"])
def test_torchtunes_module_is_found_without_its_package(tmp_path: Path, packed: str):
    source = "import psutil, torchao\nfrom torchao.dtypes.nf4tensor import NF4Tensor\n"
    source += "from torchtune.modules import TiedLinear\nfrom torchtune.utils import get_logger\n"
    source += "get_logger('DEBUG').info('here')\nprint('loaded', psutil.virtual_memory().percent >= 0)\n"
    package(tmp_path / "peers", "torchtune", "torchtune/training/_activation_offloading.py", source)
    assert loaded(tmp_path / "peers", "torchtune", packed) == "loaded True\n1.2\n"


@pytest.mark.parametrize("packed", ["unpacked", "wheel"])
def test_trls_module_is_found_without_its_package(tmp_path: Path, packed: str):
    source = "import psutil\nfrom accelerate.logging import get_logger\n"
    source += "from accelerate.utils.versions import is_torch_version\n"
    source += "get_logger(__name__).warning('here')\nprint('loaded', is_torch_version('>=', '2.5.0'))\n"
    package(tmp_path / "peers", "trl", "trl/models/activation_offloading.py", source)
    assert loaded(tmp_path / "peers", "trl", packed) == "loaded True\n1.2\n"


def test_a_missing_peer_names_what_to_download(tmp_path: Path):
    program = (
        f"import peers\ntry:\n    peers.load_torchtune([{str(tmp_path)!r}])\nexcept peers.CannotRun as e:\n    print(e)"
    )
    assert "torchtune was not found: pip download --no-deps torchtune" in python(program)


def loaded(directory: Path, name: str, packed: str) -> str:
    """What a process prints that loads the peer: stand-ins stay for its life."""
    if packed == "wheel":
        wheels = directory.parent / "wheels"
        wheels.mkdir()
        files = [str(path) for path in directory.iterdir()]
        subprocess.run([sys.executable, "-m", "zipfile", "-c", str(wheels / f"{name}-1.2.whl"), *files], check=True)
        directory = wheels
    search = f"peers.search_path(pathlib.Path({str(directory)!r}))"
    program = f"import pathlib, peers\nsearch = {search}\npeers.load_{name}(search)\n"
    return python(f"{program}print(peers.version_of({name!r}, search))")


def python(program: str) -> str:
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True).stdout
