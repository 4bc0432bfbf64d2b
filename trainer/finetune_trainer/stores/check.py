"""Looks at sources and targets before a pipeline starts: `python -m finetune_trainer.stores.check`.

Reads a JSON list of `Item` from stdin. Writes one JSON object a line to stdout: `uri`, and `problem`, which is null or
has an `exit_code` and a `message`. The stage that would fail has this exit code; BUG says that nothing is known.
"""

import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune_trainer.contract import Environment, PushTarget
from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.runtime.errors import SourceNotFound, StageError
from finetune_trainer.stores.model_files import ADAPTER_FILES
from finetune_trainer.stores.port import RemoteFile, StoreSource
from finetune_trainer.stores.schemes import open_source, open_target

# A user waits for the answer in a terminal. Loading the libraries takes a part of this time.
BUDGET_SECONDS = 15.0
"""Time after which a store counts as unavailable."""
# Enough for config.json. Reading weights would take the whole budget and prove nothing more.
MOST_BYTES = 1 << 20
"""Largest file that is read."""
NEEDED_FILES = {
    "model": ("config.json", "is not a model in Hugging Face format"),
    "adapter": (ADAPTER_FILES[0], "is no adapter in PEFT's format"),
}
"""The file by which a source of a kind is known, and the problem of a source without it."""


@dataclass(frozen=True)
class Item:
    """One URI to look at."""

    uri: str
    kind: Literal["model", "adapter", "dataset", "target"]
    revision: str | None = None
    config: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Problem:
    """Why a stage would fail."""

    exit_code: ExitCode
    message: str


def look_at(item: Item) -> Problem | None:
    """Return why a stage would fail with this URI, or None."""
    try:
        _look_at(item)
    except StageError as error:
        # A library that is missing here may be in the trainer's image, so nothing is known about the source.
        if isinstance(error.__cause__, ImportError):
            return Problem(ExitCode.BUG, str(error))
        return Problem(error.exit_code, str(error))
    except Exception as error:  # noqa: BLE001  an unknown error is no reason to refuse a pipeline
        return Problem(ExitCode.BUG, f"{item.uri}: {error!r}")
    return None


def _look_at(item: Item) -> None:
    if item.kind == "target":
        open_target(PushTarget(uri=item.uri), Environment(Path())).check()
        return
    # An adapter lies in a repository of models.
    repository: Literal["model", "dataset"] = (
        "dataset" if item.kind == "dataset" else "model"
    )
    source = open_source(
        item.uri,
        repository,
        revision=item.revision,
        config=item.config,
        split=item.split,
    )
    # A path on this machine: the pod that reads it may have another file system.
    if source is None:
        return
    listing = source.list_files(None)
    files = {file.name: file for file in listing.files}
    if item.kind in NEEDED_FILES:
        needed, problem = NEEDED_FILES[item.kind]
        if needed not in files:
            raise SourceNotFound(f"{item.uri} {problem}: it has no {needed}")
        files = {needed: files[needed]}
    _read_smallest(source, files.values())


def _read_smallest(source: StoreSource, files: Iterable[RemoteFile]) -> None:
    """Read the smallest file, if it is small: a key may be allowed to list a file and not to read it."""
    known = [(file.size, file) for file in files if file.size is not None]
    if not known:
        return
    size, smallest = min(known, key=lambda item: item[0])
    if size > MOST_BYTES:
        return
    with tempfile.TemporaryDirectory() as folder:
        source.download(smallest, Path(folder) / "file")


def look_at_all(
    items: list[Item], budget: float = BUDGET_SECONDS
) -> list[Problem | None]:
    """Return the problem of each item, looked at in parallel. An item that exceeds the budget is unavailable."""
    answers: queue.SimpleQueue[tuple[int, Problem | None]] = queue.SimpleQueue()

    def work(index: int, item: Item) -> None:
        answers.put((index, look_at(item)))

    for index, item in enumerate(items):
        # Daemon threads: a store that does not answer must not keep the process alive.
        threading.Thread(target=work, args=(index, item), daemon=True).start()
    late = f"the store does not answer within {budget:g} s; check its address and the network"
    problems: list[Problem | None] = [
        Problem(ExitCode.UNAVAILABLE, f"{item.uri}: {late}") for item in items
    ]
    deadline = time.monotonic() + budget
    for _ in items:
        left = deadline - time.monotonic()
        try:
            index, problem = answers.get(timeout=max(0.0, left))
        except queue.Empty:
            break
        problems[index] = problem
    return problems


def main() -> None:
    """Look at the items of stdin, and end the process without waiting for stores that do not answer."""
    requested = json.load(sys.stdin)
    items = [Item(**fields) for fields in requested]
    problems = look_at_all(items)
    for item, problem in zip(items, problems, strict=True):
        shown = None
        if problem is not None:
            shown = {"exit_code": problem.exit_code, "message": problem.message}
        print(json.dumps({"uri": item.uri, "problem": shown}))
    sys.stdout.flush()
    # Not sys.exit, which would let libraries of stores wait for their own threads.
    os._exit(0)


if __name__ == "__main__":
    main()
