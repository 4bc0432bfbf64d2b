"""Reads the names of lm-eval's own tasks from the files of its package. lm-eval is not imported: that takes seconds."""

# The files are read with patterns and not as YAML for the same reason: lm-eval has thousands of them.

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME = re.compile(
    rb"""^["']?(?:task|group)["']?:[ \t]*(["']?)(\S[^\n#]*?)\1[ \t]*(?:#.*)?\r?$""",
    re.MULTILINE,
)
TAGS = re.compile(rb"""^["']?tag["']?:[ \t]*(\S.*|(?:\r?\n[ \t]*-.*)+)""", re.MULTILINE)
WORD = re.compile(rb"[\w.+-]*\w[\w.+-]*")


@dataclass
class BuiltInTasks:
    """The tasks and groups of lm-eval, and its tags, which name several tasks and have no score."""

    files: dict[str, Path] = field(default_factory=dict)
    """Task or group -> the file that defines it, the first one as in lm-eval."""
    tags: set[str] = field(default_factory=set)


def read_built_in_tasks() -> BuiltInTasks | None:
    """Return the tasks of the lm-eval that is installed here; None if it is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None:
        return None
    tasks = BuiltInTasks()
    for package in spec.submodule_search_locations or ():
        # Sorted, so that the first file of a name is always the same.
        for path in sorted(_task_files(Path(package, "tasks"))):
            _add(tasks, path)
    if not tasks.files:
        return None
    return tasks


def _task_files(folder: Path) -> Iterator[Path]:
    """Yield the files of tasks, and the files without an ending that they include."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith("yaml") or "." not in name:
                yield Path(parent, name)


def _add(tasks: BuiltInTasks, path: Path) -> None:
    text = path.read_bytes()
    for value in TAGS.findall(text):
        for line in value.splitlines():
            without_comment = line.split(b"#")[0]
            tasks.tags.update(word.decode() for word in WORD.findall(without_comment))
    # A file without an ending is only included, so the name in it is not a task of its own.
    if path.suffix == ".yaml":
        for _, name in NAME.findall(text):
            tasks.files.setdefault(name.decode(), path)
