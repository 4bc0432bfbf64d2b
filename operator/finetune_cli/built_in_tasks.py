"""Reads the names of lm-eval's own tasks from the files of its package. lm-eval is not imported: that takes seconds."""

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME = re.compile(
    rb"""^["']?(?:task|group)["']?:[ \t]*(["']?)(\S[^\n#]*?)\1[ \t]*(?:#.*)?\r?$""", re.MULTILINE
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
    """Return the tasks of the lm-eval that is installed here; None where there is none."""
    spec = importlib.util.find_spec("lm_eval")
    found = BuiltInTasks()
    for package in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(_task_files(Path(package, "tasks"))):
            _add(found, path)
    return found if found.files else None


def _task_files(folder: Path) -> Iterator[Path]:
    """Yield the files of tasks, and those without an ending that they include."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if name.endswith("yaml") or "." not in name)


def _add(found: BuiltInTasks, path: Path) -> None:
    text = path.read_bytes()
    for listed in TAGS.findall(text):
        found.tags.update(
            word.decode()
            for line in listed.splitlines()
            for word in WORD.findall(line.split(b"#")[0])
        )
    if path.suffix == ".yaml":
        for _, name in NAME.findall(text):
            found.files.setdefault(name.decode(), path)
