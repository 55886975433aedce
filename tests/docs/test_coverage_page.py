"""docs/coverage.md and docs/gallery.md name tests, files and commands: each must exist."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import DOCS, missing_tests, named_tests, tables

SYSTEMS = ["FastVideo, pull request 1106", "flame", "Megatron-LM, pull request 1752", "ms-swift, pull request 7201"]
EXAMPLES = DOCS.parent / "examples"


def test_each_test_that_the_page_names_exists():
    assert missing_tests("coverage.md") == []
    assert len(named_tests("coverage.md")) > 60


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_feature_names_a_test_or_is_told_as_not_covered(system: str):
    rows = tables("coverage.md", system)
    assert len(rows) >= 8
    assert [row[0] for row in rows if "`test_" not in row[-1] and "not covered" not in row[1]] == []


def test_each_file_that_a_port_begins_with_exists():
    port = (DOCS / "coverage.md").read_text().split("**Where a port begins.**")[1]
    assert len(re.findall(r"\(\.\./csrc/", port)) >= 3


def test_the_gallery_shows_each_example_with_its_command():
    page = (DOCS / "gallery.md").read_text()
    commands = re.findall(r"^ +(?:python|torchrun)\b.* examples/(\w+\.py)", page, flags=re.MULTILINE)
    scripts = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("_")}
    assert scripts - set(commands) == set()
    assert set(commands) - scripts == set()


def test_each_section_of_the_gallery_begins_with_its_picture():
    """The site makes a card of each, with the picture as its thumbnail."""
    page = (DOCS / "gallery.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    pictures = [re.match(r"[^\n]+\n\n!\[[^]]+\]\(([^)]+)\)\n", section) for section in sections]
    assert [section.splitlines()[0] for section, found in zip(sections, pictures, strict=True) if not found] == []
    assert [found[1] for found in pictures if found and not (DOCS / found[1]).exists()] == []
    assert page.count("<!-- cards -->") == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_pictures_of_the_gallery_are_drawn_from_its_lines(tmp_path: Path):
    """The same files as in docs/pictures, if those were drawn by the same release of matplotlib."""
    tool = DOCS.parent / "tools" / "gallery_pictures.py"
    subprocess.run([sys.executable, str(tool), "--into", str(tmp_path)], capture_output=True, check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert set(drawn) == set(committed)
    release = re.compile("Matplotlib v[0-9.]+")
    same = [name for name in drawn if release.findall(drawn[name]) == release.findall(committed[name])]
    assert [name for name in same if drawn[name] != committed[name]] == []
