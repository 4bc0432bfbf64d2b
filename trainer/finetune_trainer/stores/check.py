"""Looks at sources and targets before a pipeline starts: `python -m finetune_trainer.stores.check`.

Reads a JSON list of `Item` from stdin. Writes one JSON object a line to stdout: `uri`, and `problem`, which is null or
has an `exit_code` and a `message`. The exit code is that of the stage that would fail; BUG says that nothing is known.
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
from finetune_trainer.stores.fetching import ADAPTER_FILES
from finetune_trainer.stores.port import RemoteFile, StoreSource
from finetune_trainer.stores.schemes import open_source, open_target

BUDGET_SECONDS = 15.0
"""Time after which a store counts as unavailable. Loading the libraries takes a part of it."""
MOST_BYTES = 1 << 20
"""Largest file that is read."""
NEEDED = {
    "model": ("config.json", "is not a model in Hugging Face format"),
    "adapter": (ADAPTER_FILES[0], "is no adapter in PEFT's format"),
}
"""The file by which a source of a kind is known, and what a source without it is not."""


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
        missing = isinstance(error.__cause__, ImportError)  # here; the trainer's image may have it
        return Problem(ExitCode.BUG if missing else error.exit_code, str(error))
    except Exception as error:  # noqa: BLE001  whatever it is, it is no reason to refuse a pipeline
        return Problem(ExitCode.BUG, f"{item.uri}: {error!r}")
    return None


def _look_at(item: Item) -> None:
    if item.kind == "target":
        open_target(PushTarget(uri=item.uri), Environment(Path())).check()
        return
    repository: Literal["model", "dataset"] = "dataset" if item.kind == "dataset" else "model"
    source = open_source(
        item.uri, repository, revision=item.revision, config=item.config, split=item.split
    )
    if source is None:
        return
    files = {file.name: file for file in source.list_files(None).files}
    if item.kind in NEEDED:
        needed, what = NEEDED[item.kind]
        if needed not in files:
            raise SourceNotFound(f"{item.uri} {what}: it has no {needed}")
        files = {needed: files[needed]}
    _read_smallest(source, files.values())


def _read_smallest(source: StoreSource, files: Iterable[RemoteFile]) -> None:
    """Read the smallest file, if it is small: a key may be allowed to list what it may not read."""
    small = [file for file in files if file.size is not None and file.size <= MOST_BYTES]
    if small:
        with tempfile.TemporaryDirectory() as folder:
            source.download(min(small, key=lambda file: file.size or 0), Path(folder) / "file")


def look_at_all(items: list[Item], budget: float = BUDGET_SECONDS) -> list[Problem | None]:
    """Return the problem of each item, looked at in parallel. What takes longer than the budget is unavailable."""
    answers: queue.SimpleQueue[tuple[int, Problem | None]] = queue.SimpleQueue()
    for index, item in enumerate(items):
        threading.Thread(
            target=lambda i=index, one=item: answers.put((i, look_at(one))), daemon=True
        ).start()
    late = f"the store does not answer within {budget:g} s; check its address and the network"
    found: list[Problem | None] = [
        Problem(ExitCode.UNAVAILABLE, f"{item.uri}: {late}") for item in items
    ]
    deadline = time.monotonic() + budget
    for _ in items:
        try:
            index, problem = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[index] = problem
    return found


def main() -> None:
    """Look at the items of stdin, and end the process without waiting for stores that do not answer."""
    items = [Item(**one) for one in json.load(sys.stdin)]
    for item, problem in zip(items, look_at_all(items), strict=True):
        about = {"exit_code": problem.exit_code, "message": problem.message} if problem else None
        print(json.dumps({"uri": item.uri, "problem": about}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
