"""The demo's data: the doc-strings of the standard library of the running Python.

The library's files are parsed and never imported, so none of their code runs.
"""

import ast
import random  # noqa: TID251  seeded: the same Python version gives the same rows
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))

MODULES = (
    "asyncio",
    "decimal",
    "email",
    "http",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
"""The choices of the task: the modules with the most doc-strings that every Python since 3.11 includes."""

SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
"""Third-party packages, tests, a desktop program, and lib2to3, which later Python versions lack."""

# A shorter doc-string does not identify its module, and a longer one only costs time.
SHORTEST = 40
LONGEST = 200
"""Characters of a doc-string."""

HELD_OUT = 32
"""Test rows of each module. All modules have the same number, so that a constant answer scores one in eight."""


def split(
    owners: dict[str, set[str]], seed: int
) -> tuple[list[dict[str, str]], list[dict[str, str]], list[str]]:
    """Return training rows, held-out test rows, and texts to pre-train on in the order of their files.

    `owners` is the result of `gather`. A row is {"text": doc-string, "module": name}. No text of the test rows is in
    the other two lists, and a text that several modules share is in no row. Raises SystemExit if a module has too few
    doc-strings.
    """
    generator = random.Random(seed)  # noqa: S311  not for cryptography
    train: list[dict[str, str]] = []
    test: list[dict[str, str]] = []
    for module in MODULES:
        rows = [
            {"text": text, "module": module}
            for text, names in owners.items()
            if names == {module}
        ]
        if len(rows) < 3 * HELD_OUT:
            raise SystemExit(
                f"{module}: {len(rows)} doc-strings, at least {3 * HELD_OUT} are needed; "
                "the standard library may be incomplete: install it in full"
            )
        generator.shuffle(rows)
        test += rows[:HELD_OUT]
        train += rows[HELD_OUT:]
    generator.shuffle(train)
    generator.shuffle(test)
    held_out = {row["text"] for row in test}
    pretraining = [text for text in owners if text not in held_out]
    return train, test, pretraining


def gather(library: Path = LIBRARY) -> dict[str, set[str]]:
    """Return every doc-string below a folder with the modules it occurs in, in the order of the file names."""
    owners: dict[str, set[str]] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            for text in docstrings(path):
                owners.setdefault(text, set()).add(module_name(parts[0]))
    return owners


def module_name(entry: str) -> str:
    """Return the public module name: decimal for _pydecimal.py, which is its Python implementation."""
    return entry.removesuffix(".py").removeprefix("_py")


def docstrings(path: Path) -> Iterator[str]:
    """Yield the doc-strings of a file's module, classes and functions, shortened to LONGEST characters."""
    try:
        tree = ast.parse(path.read_bytes())
    except (
        SyntaxError,
        ValueError,
    ):  # some files of the library are intentionally invalid
        return
    for node in documented(tree):
        text = ast.get_docstring(node) or ""
        if len(text) >= SHORTEST:
            yield textwrap.shorten(text, LONGEST, placeholder="")


def documented(
    tree: ast.Module,
) -> Iterable[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the nodes that can have a doc-string."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))
