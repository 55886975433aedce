"""The notebooks of examples/, each run in a kernel of its own as a reader runs it on a CPU."""

from pathlib import Path

import pytest

from places import EXAMPLES

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def output_of(cell: dict) -> str:
    """The text and the kinds of data that a cell has shown."""
    shown = [output.get("text", "") or " ".join(output.get("data", {})) for output in cell.get("outputs", [])]
    return "\n".join(shown)


@pytest.mark.slow
def test_the_notebook_of_fit_shows_its_report_and_its_frontier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An error in a cell is an error of the test."""
    assert [path.name for path in NOTEBOOKS] == ["fit.ipynb"]
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    nbformat.validate(notebook)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=folder).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = "\n".join(map(output_of, code))
    assert "torchoffload.fit: Sequential, " in shown
    assert "What the blocks do:" in shown
    assert "Time against memory" in shown
    assert "image/png" in shown
    assert (tmp_path / "frontier.png").stat().st_size > 0
