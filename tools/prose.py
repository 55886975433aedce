"""Count two turns of phrase that are hard to read, in comments, docstrings and pages: ``python tools/prose.py``.

A noun clause with "what" ("what is saved", "what waits") hides the name of a thing: "the saved tensors", "the pending
copies". A "where" that is no place hides a condition: "if". The counts are a report, and no test fails by them. Goals,
for each 1,000 words: at most 1.0 with "what", at most 1.5 with "where".
"""

import argparse
import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"csrc": ("*.h", "*.cpp", "*.cu"), "src": ("*.py",), "docs": ("*.md",)}
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
QUESTION = re.compile(r"\bwhat\b[^.!?;]*\?", re.IGNORECASE)


def text_of_page(path: Path) -> str:
    """The page without code, tables' bars and addresses."""
    text = CODE_BLOCK.sub(" ", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`]*`|\]\([^)]*\)|\|", " ", text)


def text_of_cpp(path: Path) -> str:
    """The comments that begin with //."""
    return "\n".join(re.findall(r"//+(.*)", path.read_text(encoding="utf-8")))


def text_of_python(path: Path) -> str:
    """The comments and the docstrings."""
    with path.open("rb") as file:
        comments = [token.string[1:] for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented))
    return "\n".join([*comments, *(ast.get_docstring(node) or "" for node in nodes)])


READERS = {".md": text_of_page, ".h": text_of_cpp, ".cpp": text_of_cpp, ".cu": text_of_cpp, ".py": text_of_python}


def counts_of(text: str) -> tuple[int, int, int]:
    """The number of words, of noun clauses with "what", and of "where"."""
    plain = QUESTION.sub(" ", text)
    return (
        len(re.findall(r"[A-Za-z][\w'-]*", text)),
        len(re.findall(r"\bwhat\b", plain, re.IGNORECASE)),
        len(re.findall(r"\bwhere\b", plain, re.IGNORECASE)),
    )


def files_of(part: str) -> Iterator[Path]:
    """The files of a part of the project, in order."""
    yield from sorted(path for pattern in PARTS[part] for path in (ROOT / part).rglob(pattern))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=0, metavar="N", help="also the N files with the most of both")
    options = parser.parse_args()
    for part in PARTS:
        found = {path: counts_of(READERS[path.suffix](path)) for path in files_of(part)}
        words, clauses, wheres = (sum(each[number] for each in found.values()) for number in range(3))
        print(
            f"{part:5} {words:6} words; for each 1,000: {1000 * clauses / words:.1f} with 'what', "
            f"{1000 * wheres / words:.1f} with 'where'"
        )
        for path in sorted(found, key=lambda path: -sum(found[path][1:]))[: options.files]:
            print(f"    {found[path][1]:4} {found[path][2]:4}  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
