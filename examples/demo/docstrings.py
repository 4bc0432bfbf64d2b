"""The demo's text: the doc-strings of the Python that runs it.

The files of the standard library are parsed and never imported, so nothing in them runs.
"""

import ast
import random  # noqa: TID251  seeded: the same Python gives the same rows
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))

MODULES = ("asyncio", "decimal", "email", "http", "logging", "multiprocessing", "unittest", "xml")
"""The answers to choose from: the richest in doc-strings of what every Python from 3.11 on brings along."""

NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Other people's packages, tests, a desktop program and a library that later Pythons have not."""

SHORTEST, LONGEST = 40, 200
"""Characters of a doc-string: less says nothing about its module, more only takes time."""

HELD_OUT = 32
"""Rows of each module kept for the exam. The same of each, so that a constant answer scores one in eight."""


def split(owners: dict[str, set[str]], seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]], list[str]]:
    """Give rows to train on, rows to examine with, and plain texts for the base model in the order of their files.

    `owners` is what `gather` gives. The rows are {"text": doc-string, "module": name}. No text of the exam is in
    the other two lists, and a text that several modules share is in no row at all.
    """
    chance = random.Random(seed)  # noqa: S311  no secret
    train: list[dict[str, str]] = []
    exam: list[dict[str, str]] = []
    for module in MODULES:
        rows = [{"text": text, "module": module} for text, names in owners.items() if names == {module}]
        if len(rows) < 3 * HELD_OUT:
            raise SystemExit(f"{module}: only {len(rows)} doc-strings; is the standard library installed in full?")
        chance.shuffle(rows)
        exam += rows[:HELD_OUT]
        train += rows[HELD_OUT:]
    chance.shuffle(train)
    chance.shuffle(exam)
    unseen = {row["text"] for row in exam}
    plain = [text for text in owners if text not in unseen]
    return train, exam, plain


def gather(library: Path = LIBRARY) -> dict[str, set[str]]:
    """Give every doc-string below a folder with the modules it is in, both in the order of the files' names."""
    owners: dict[str, set[str]] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if NOT_TEXT.isdisjoint(parts):
            for text in docstrings(path):
                owners.setdefault(text, set()).add(module_name(parts[0]))
    return owners


def module_name(entry: str) -> str:
    """Give the name that people import: decimal for _pydecimal.py, which is its source in Python."""
    return entry.removesuffix(".py").removeprefix("_py")


def docstrings(path: Path) -> Iterator[str]:
    """Give the doc-strings of a file's module, classes and functions, shortened to LONGEST characters."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # some files are broken on purpose
        return
    for node in documented(tree):
        text = ast.get_docstring(node) or ""
        if len(text) >= SHORTEST:
            yield textwrap.shorten(text, LONGEST, placeholder="")


def documented(tree: ast.Module) -> Iterable[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Give the nodes that can have a doc-string."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))
