"""test_package.py: what the build and the import refuse, and in which words."""

import importlib.util
import pathlib
import subprocess
import sys
import tomllib

import pytest
import torch

from places import ROOT
from torchoffload import _core
from torchoffload._core import BuildInfo

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load_probe():
    spec = importlib.util.spec_from_file_location("probe_torch", ROOT / "tools" / "probe_torch.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


probe_torch = load_probe()


def make_torch(
    site_packages: pathlib.Path, version: str, cuda: str | None = None, hip: str | None = None
) -> pathlib.Path:
    """A torch package as far as the probe looks: version.py and the names of the libraries."""
    directory = site_packages / "torch"
    (directory / "lib").mkdir(parents=True)
    (directory / "__init__.py").write_text("raise ImportError('the probe must not import torch')\n")
    (directory / "version.py").write_text(
        f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
        f"hip: Optional[str] = {hip!r}\n"
    )
    for name in (*probe_torch.CPU_LIBRARIES, *probe_torch.CUDA_LIBRARIES):
        (directory / "lib" / f"lib{name}.so").write_bytes(b"std::__cxx11")
    return directory


def make_cuda_headers(include: pathlib.Path, version: int, *, crt: bool = True) -> None:
    include.mkdir(parents=True)
    (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    if crt:
        (include / "crt").mkdir()
        (include / "crt" / "host_defines.h").touch()


@pytest.fixture
def no_toolkit(monkeypatch):
    monkeypatch.setattr(probe_torch, "toolkit_roots", list)


# --- What import refuses ---


@pytest.mark.parametrize(
    ("built", "torch_version", "cuda_version"),
    [
        (("2.13.0+cpu", None), "2.13.0+cpu", None),
        (("2.13.0+cpu", None), "2.13.1", None),
        (("2.11.0+cu130", "13.0"), "2.11.0+cu132", "13.2"),
    ],
)
def test_a_torch_of_the_same_minor_release_and_variant_is_accepted(built, torch_version, cuda_version):
    _core.check_torch(BuildInfo("0.1.0", *built), torch_version, cuda_version)


@pytest.mark.parametrize(
    ("built", "torch_version", "cuda_version", "words"),
    [
        (("2.13.0+cpu", None), "2.12.0+cpu", None, ["2.13.0+cpu (CPU)", "2.12.0+cpu (CPU)"]),
        (("2.1.0", None), "2.13.0", None, ["2.1.0 (CPU)", "2.13.0 (CPU)"]),
        (("2.13.0+cpu", None), "2.13.0+cu130", "13.0", ["2.13.0+cpu (CPU)", "2.13.0+cu130 (CUDA 13.0)"]),
        (("2.11.0+cu130", "13.0"), "2.11.0+cpu", None, ["(CUDA 13.0)", "2.11.0+cpu (CPU)"]),
        (("2.11.0+cu130", "13.0"), "2.11.0+cu128", "12.8", ["(CUDA 13.0)", "(CUDA 12.8)"]),
    ],
)
def test_another_torch_is_refused_with_both_and_the_command(built, torch_version, cuda_version, words):
    with pytest.raises(ImportError) as error:
        _core.check_torch(BuildInfo("0.1.0", *built), torch_version, cuda_version)
    for word in [*words, "Rebuild", _core._rebuild_command()]:
        assert word in str(error.value)


@pytest.mark.parametrize(("built", "running"), [(None, "6.4"), ("6.4", None)])
def test_a_core_for_rocm_and_one_for_the_cpu_are_not_the_same(built, running):
    with pytest.raises(ImportError, match=r"ROCm 6\.4"):
        _core.check_torch(BuildInfo("0.1.0", "2.13.0", None, built), "2.13.0", None, running)
    _core.check_torch(BuildInfo("0.1.0", "2.13.0", None, running), "2.13.0", None, running)


@pytest.mark.parametrize(
    ("package", "prefix", "command"),
    [
        ("checkout/src/torchoffload", "checkout/.venv", "make build"),
        ("checkout/src/torchoffload", "elsewhere", f"make site PYTHON={sys.executable} "),
        ("elsewhere/site-packages/torchoffload", "elsewhere", "pip install --force-reinstall --no-deps"),
    ],
)
def test_the_command_fits_the_way_of_installation(monkeypatch, tmp_path, package, prefix, command):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "CMakeLists.txt").touch()
    monkeypatch.setattr(_core, "_PACKAGE_DIR", tmp_path / package)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / prefix))
    assert command in _core._rebuild_command()


def test_without_a_compiled_core_the_command_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"compiled core is not built\. Build it with: "):
        _core.read_build_info(tmp_path / "_build_info.json")


@pytest.mark.parametrize(("platform", "name"), [("win32", "Windows"), ("darwin", "macOS"), ("aix", "aix")])
def test_other_systems_are_refused_by_name(platform, name):
    with pytest.raises(ImportError, match=f"Linux only, not {name}"):
        _core.check_platform(platform, None, None)
    with pytest.raises(probe_torch.ProbeError, match=f"Linux only, not {name}"):
        probe_torch.check_platform(platform)


@pytest.mark.parametrize("generic_backend", [None, "", "0"])
def test_rocm_has_to_be_asked_for(generic_backend):
    """Nobody has run it there; the text says what to try and to send."""
    with pytest.raises(ImportError, match=r"never been run on ROCm .*HIP 6\.4.*TORCHOFFLOAD_GENERIC_BACKEND=1 to try"):
        _core.check_platform("linux", "6.4", generic_backend)
    _core.check_platform("linux", "6.4", "1")


def test_the_core_says_what_it_was_built_for():
    assert _core.build_info.torch_version == torch.__version__
    assert _core.core.built_with_cuda == (_core.build_info.cuda_version is not None)
    assert _core.build_info.version == PROJECT["project"]["version"]


# --- Which core a wheel takes ---


@pytest.fixture
def wheel(tmp_path) -> pathlib.Path:
    """The package directory of a wheel, as far as the search for a core looks."""
    for minor in ("2.9", "2.10", "2.15"):
        for variant in ("cpu", "cuda"):
            (tmp_path / "_compiled" / f"torch-{minor}-{variant}").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("torch_version", "cuda_version", "name"),
    [
        ("2.9.0+cpu", None, "torch-2.9-cpu"),
        ("2.9.1", None, "torch-2.9-cpu"),
        ("2.10.0+cu128", "12.8", "torch-2.10-cuda"),
        ("2.15.0a0+git1234", "13.2", "torch-2.15-cuda"),
    ],
)
def test_a_wheel_takes_the_core_of_the_minor_release_and_variant_that_runs(wheel, torch_version, cuda_version, name):
    assert _core.find_core(wheel, torch_version, cuda_version) == wheel / "_compiled" / name


@pytest.mark.parametrize(
    ("torch_version", "cuda_version", "variant"),
    [
        ("2.16.0", None, "CPU"),
        ("2.16.0+cu140", "14.0", "CUDA 14.0"),
        ("2.8.0", "12.6", "CUDA 12.6"),
        ("2.15.0+cu140", "14.0", "CUDA 14.0"),
    ],
)
def test_a_wheel_without_a_core_for_this_torch_says_what_it_serves_and_how_to_build(
    wheel, torch_version, cuda_version, variant
):
    with pytest.raises(ImportError) as error:
        _core.find_core(wheel, torch_version, cuda_version)
    assert str(error.value) == (
        f"This wheel of torchoffload serves torch 2.9, 2.10, 2.15 (CPU, CUDA 12 and 13), but this is torch "
        f"{torch_version} ({variant}). Install one of those, look for a newer torchoffload, or build it from source "
        f"for this torch, which takes a C++20 compiler: {_core._PIP_COMMAND}"
    )


def test_a_wheel_has_no_core_for_rocm(wheel):
    with pytest.raises(ImportError, match=r"but this is torch 2\.10\.0\+rocm6\.4 \(ROCm 6\.4\).* build it from source"):
        _core.find_core(wheel, "2.10.0+rocm6.4", None, "6.4")


def test_a_build_from_source_has_its_core_in_the_package(tmp_path):
    assert _core.find_core(tmp_path, "2.16.0", None) == tmp_path


# --- What the build finds ---


def test_torch_is_never_a_requirement_of_the_build():
    assert not [name for name in PROJECT["build-system"]["requires"] if name.startswith("torch")]


def test_the_range_of_torch_is_the_same_everywhere():
    oldest, (major, minor) = probe_torch.OLDEST_TORCH, probe_torch.NEWEST_TORCH
    expected = f"torch>={probe_torch.dotted(oldest)},<{major}.{minor + 1}"
    assert PROJECT["project"]["dependencies"] == [expected]


def test_the_probe_sees_this_torch_from_an_isolated_child(tmp_path):
    found = tmp_path / "found.cmake"
    command = [sys.executable, "-I", str(ROOT / "tools" / "probe_torch.py"), "--cmake", str(found)]
    subprocess.run(command, check=True, timeout=60)
    assert f'set(TORCH_VERSION "{torch.__version__}")' in found.read_text()
    assert f'set(TORCH_CXX11_ABI "{int(torch.compiled_with_cxx11_abi())}")' in found.read_text()


def test_the_probe_imports_nothing_of_torch(tmp_path, monkeypatch):
    directory = make_torch(tmp_path, "2.13.0+cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    assert probe_torch.find_torch_directory() == directory
    assert probe_torch.read_torch(directory).version == "2.13.0+cpu"


@pytest.mark.parametrize("version", ["2.8.1", "2.16.0", "1.13.0+cu117"])
def test_a_torch_out_of_range_is_refused_with_the_range(tmp_path, version):
    with pytest.raises(probe_torch.ProbeError, match=r"supports torch 2\.9 to 2\.15, but .* is torch " + version[:4]):
        probe_torch.read_torch(make_torch(tmp_path, version))


def test_a_rocm_torch_is_built_for_with_the_libraries_of_all_builds_alone(tmp_path):
    torch = probe_torch.read_torch(make_torch(tmp_path, "2.13.0+rocm6.4", hip="6.4"))
    assert [path.name for path in torch.libraries] == [f"lib{name}.so" for name in probe_torch.CPU_LIBRARIES]
    text = probe_torch.cmake_text(torch)
    assert 'set(TORCH_HIP_VERSION "6.4")' in text
    assert 'set(TORCH_CUDA_VERSION "")' in text
    assert 'set(TORCH_CUDA_HEADERS_VERSION "")' in text


def test_other_torches_have_no_hip(tmp_path):
    torch = probe_torch.read_torch(make_torch(tmp_path, "2.13.0+cpu"))
    assert 'set(TORCH_HIP_VERSION "")' in probe_torch.cmake_text(torch)


def test_for_a_wheel_a_cuda_torch_is_taken_as_a_cpu_build(tmp_path, no_toolkit):
    directory = make_torch(tmp_path, "2.9.0+cu128", cuda="12.8")
    make_cuda_headers(tmp_path / "nvidia" / "cu13" / "include", 13000)
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir()
    (tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13").touch()
    torch = probe_torch.read_torch(directory, as_cpu=True)
    assert [path.name for path in torch.libraries] == [f"lib{name}.so" for name in probe_torch.CPU_LIBRARIES]
    text = probe_torch.cmake_text(torch)
    assert 'set(TORCH_CUDA_VERSION "")' in text
    assert f'set(TORCH_CUDA_HEADERS_VERSION "{probe_torch.CHECK_CUDA}")' in text


def test_without_torch_one_sentence_says_what_to_do(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-I", ROOT / "tools" / "probe_torch.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "install torch (2.9 to 2.15) there first" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_cuda_headers_come_from_pips_packages(tmp_path, no_toolkit):
    make_torch(tmp_path, "2.11.0+cu130", cuda="13.0")
    make_cuda_headers(tmp_path / "nvidia" / "cu13" / "include", 13000)
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir()
    library.touch()
    toolkit = probe_torch.find_toolkit(tmp_path, "13.0")
    assert toolkit.include_dirs == [tmp_path / "nvidia" / "cu13" / "include"]
    assert toolkit.cudart == library


def test_cuda_12_has_its_headers_in_two_packages(tmp_path, no_toolkit):
    make_cuda_headers(tmp_path / "nvidia" / "cuda_runtime" / "include", 12080, crt=False)
    (tmp_path / "nvidia" / "cuda_nvcc" / "include" / "crt").mkdir(parents=True)
    (tmp_path / "nvidia" / "cuda_nvcc" / "include" / "crt" / "host_defines.h").touch()
    (tmp_path / "nvidia" / "cuda_runtime" / "lib").mkdir()
    (tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12").touch()
    names = [path.parent.name for path in probe_torch.find_toolkit(tmp_path, "12.8").include_dirs]
    assert names == ["cuda_runtime", "cuda_nvcc"]


def test_a_toolkit_of_another_major_release_is_not_taken(tmp_path, monkeypatch):
    make_cuda_headers(tmp_path / "cuda" / "include", 13000)
    monkeypatch.setattr(probe_torch, "toolkit_roots", lambda: [tmp_path / "cuda"])
    with pytest.raises(probe_torch.ProbeError, match=r"CUDA 12\.8 build .*CUDA_HOME .*'nvidia-cuda-runtime-cu12=="):
        probe_torch.find_toolkit(tmp_path / "site-packages", "12.8")
