"""The local files that a task file of lm-eval reads: other YAML files, members of groups, data and Python modules."""

import ast
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEFINING_KEYS = frozenset({"task", "group", "tag"})
"""Keys whose values are names of tasks."""
FOLDER_KEYS = frozenset({"data_dir", "data_files", "dataset_path", "metric"})
"""Keys whose values may be folders or patterns."""
YAML = (".yaml", ".yml")
PATTERN = re.compile(r"[*?\[]")
# A larger file is data, whatever its name.
MOST_BYTES = 4 << 20
"""Size of a YAML file or a module that is parsed."""


class _Function(str):
    """The value of a `!function` tag."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """A loader that imports nothing."""


_Loader.add_multi_constructor("!", lambda _loader, _tag, node: _Function(node.value))


@dataclass(frozen=True)
class _Mention:
    """A text in a file that may name another file."""

    text: str
    keys: tuple[str, ...] = ()
    is_module: bool = False


def files_of_task(path: Path) -> list[Path]:
    """Return the files that the task file reads, in the order of their names and without itself.

    A file is among them if any text in a file that is read names it, so there may be more than lm-eval reads.
    """
    root = path.parent
    files: set[Path] = {path}
    waiting = [path]
    # lm-eval includes files of any name.
    included: set[Path] = {path}
    while waiting:
        file = waiting.pop()
        mentions = _mentions(file, is_yaml=file in included)
        named: set[Path] = set()
        for mention in mentions:
            sources = {*_named(mention, file, root)}
            named |= sources
            if "include" in mention.keys:
                included |= sources
        named |= _members(mentions, root)
        waiting += named - files
        files |= named
    return sorted(files - {path})


def _members(mentions: Sequence[_Mention], root: Path) -> set[Path]:
    """Return the files below the folder that define the members of the groups in a file."""
    if not any("group" in mention.keys for mention in mentions):
        return set()
    names = {mention.text for mention in mentions if "task" in mention.keys}
    return {
        path
        for path in _yaml_files(root)
        if names & {mention.text for mention in _mentions(path) if _defines(mention)}
    }


def _defines(mention: _Mention) -> bool:
    return bool(DEFINING_KEYS & {*mention.keys[:1]})


def _yaml_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        # Environments and work folders hold many files, and no task.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(YAML):
                yield Path(folder, name)


def _mentions(file: Path, *, is_yaml: bool = False) -> tuple[_Mention, ...]:
    """Return the texts of a YAML file or a module that may name files; none for other files."""
    if not is_yaml and not file.name.endswith((*YAML, ".py")):
        return ()
    try:
        info = file.stat()
    except OSError:
        return ()
    if info.st_size > MOST_BYTES:
        return ()
    return _parsed(file, info.st_size, info.st_mtime_ns)


# The size and the time are part of the key: the files are looked at whenever the pipeline is observed.
@functools.lru_cache(1024)
def _parsed(file: Path, _size: int, _time: int) -> tuple[_Mention, ...]:
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".py":
            return tuple(_of_module(ast.parse(text)))
        # The loader is a SafeLoader.
        return tuple(_of_yaml(yaml.load(text, _Loader), ()))  # noqa: S506
    except (OSError, ValueError, SyntaxError, RecursionError, yaml.YAMLError):
        # Evaluate reports it.
        return ()


def _of_yaml(value: Any, keys: tuple[str, ...]) -> Iterator[_Mention]:
    if isinstance(value, _Function):
        yield _Mention(value.rpartition(".")[0], keys, is_module=True)
    elif isinstance(value, str):
        yield _Mention(value, keys)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _of_yaml(inner, (*keys, str(key)))
    elif isinstance(value, list):
        for inner in value:
            yield from _of_yaml(inner, keys)


def _of_module(module: ast.Module) -> Iterator[_Mention]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Mention(alias.name, is_module=True)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            yield _Mention(name, is_module=True)
            for alias in node.names:
                yield _Mention(f"{name}.{alias.name}".strip("."), is_module=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _Mention(node.value)


def _named(mention: _Mention, file: Path, root: Path) -> Iterator[Path]:
    """Yield the files that a text names, from the folder of its file or from the folder of the task file."""
    text = mention.text
    if mention.is_module:
        text = text.replace(".", "/") + ".py"
    # Archives and protocols: zip://questions.jsonl::questions.zip.
    for part in text.split("::"):
        name = part.removeprefix("file://")
        for folder in {file.parent, root}:
            yield from _at(folder, name, is_folder=bool(FOLDER_KEYS & {*mention.keys}))


def _at(folder: Path, name: str, *, is_folder: bool) -> Iterator[Path]:
    try:
        path = Path(os.path.normpath(folder / name))
        if path.is_file():
            yield path
        elif is_folder and path != folder and path.is_dir():
            yield from (inner for inner in path.rglob("*") if inner.is_file())
        elif is_folder and PATTERN.search(name):
            yield from (match for match in folder.glob(name) if match.is_file())
    except (OSError, ValueError, NotImplementedError, IndexError):
        # A text that is no file name, such as a prompt.
        return
