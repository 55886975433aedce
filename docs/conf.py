"""The site: Sphinx with MyST and PyTorch's theme. `make docs` builds it into build/docs."""

import logging
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torchoffload  # noqa: E402

project = "torchoffload"
author = "torchoffload contributors"
copyright = f"{author}. BSD-3-Clause"  # noqa: A001  (Sphinx's name for it)
version = release = torchoffload.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "pytorch_sphinx_theme2",
]
exclude_patterns = ["_templates"]
templates_path = ["_templates"]
default_role = "code"
highlight_language = "none"

# Markdown as GitHub has it: its anchors of headings, so that each link is checked by the build.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# The libraries of trainers are not needed to read their adapters' docstrings.
autodoc_mock_imports = ["accelerate", "lightning", "pytorch_lightning", "transformers", "trl"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types are in the docstrings, in words
autosummary_generate = False
napoleon_google_docstring = False
napoleon_use_rtype = False
copybutton_exclude = ".linenos, .gp, .go"

intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}
intersphinx_timeout = 5

html_theme = "pytorch_sphinx_theme2"
html_title = "torchoffload"
html_theme_options = {
    "navigation_with_keys": False,
    "header_links_before_dropdown": 8,
    "show_lf_header": False,
    "show_lf_footer": False,
    "show_pytorch_org_link": False,
    "use_edit_page_button": False,
    "article_header_end": "",
    "article_footer_items": "",
    "secondary_sidebar_items": "page-toc",
    "navbar_end": "search-button, theme-switcher",
    "footer_start": "copyright",
    "footer_end": "sphinx-version",
    "llm_disabled": True,
    "pygments_light_style": "tango",
}
html_show_sourcelink = False
linkcheck_timeout = 20
linkcheck_anchors = False


class _InventoriesMayBeOutOfReach(logging.Filter):
    """Without a network there are no links to the pages of PyTorch and Python, which is no fault of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Turn a warning about inventories into a note, so that -W lets it pass."""
        if record.levelno == logging.WARNING and "inventor" in record.getMessage():
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


logging.getLogger("sphinx.sphinx.ext.intersphinx").addFilter(_InventoriesMayBeOutOfReach())


# Pages that lie elsewhere in the repository, by the page of the site that shows each.
SHOWN = {
    "benchmarks": "benchmarks/README.md",
    "changes": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
}
PAGES = {ROOT / file: f"{page}.md" for page, file in SHOWN.items()} | {ROOT / "README.md": "index.md"}
LINK = re.compile(r"\[([^][]*)\]\((?![a-z]+:|#)([^)\s#]+)")


# A section that begins with a picture. A page with the mark gets a card for each of its own: thumbnail and title.
CARDS = "<!-- cards -->"
PICTURED = re.compile(r"^## (.+)\n\n!\[[^]]*\]\(([^)]+)\)", flags=re.MULTILINE)


def cards_of(text: str) -> str:
    """Make the cards that lead to the sections of a page."""
    cards = ["::::{grid} 1 2 3 3", ":gutter: 3", ""]
    for title, picture in PICTURED.findall(text):
        link = f':link: "#{nodes.make_id(title)}"'
        cards += [f":::{{grid-item-card}} {title}", f":img-top: {picture}", link, ":link-type: url", ":::"]
    return "\n".join([*cards, "::::"])


def make_a_page_of_the_site(_app: Sphinx, page: str, source: list[str]) -> None:
    """Show a page that lies elsewhere in place of its stub, and lead links to where they lead in the site.

    A link whose text is the name of a page's file, as GitHub's readers know it, gets the title of that page.
    """
    path = ROOT / SHOWN.get(page, f"docs/{page}")
    if page in SHOWN:
        source[0] = path.read_text(encoding="utf-8")

    def for_the_site(link: re.Match[str]) -> str:
        text, target = link[1], Path(os.path.normpath(path.parent / link[2]))
        is_name = text in (target.name, f"docs/{target.name}") and target.suffix == ".md"
        return f"[{'' if is_name else text}](" + PAGES.get(target, os.path.relpath(target, ROOT / "docs"))

    source[0] = LINK.sub(for_the_site, source[0])
    source[0] = source[0].replace(CARDS, cards_of(source[0]))


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("source-read", make_a_page_of_the_site)
