"""The runs on this machine: each is a folder with the pipeline and the path of its manifest.

An index of the user has a link to each run in a RUNS folder, so that its name is enough in any other folder.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from finetune_cli.diagnostics import UsageError
from finetune_operator.local.file_names import PIPELINE_FILE

RUNS = Path(".finetune")
"""Folder of the runs on this machine, relative to the current folder."""
MANIFEST = "manifest"
"""File in the folder of a run with the absolute path of its manifest."""
UNTIL = "until"
"""File in the folder of a run with the last stage that `finetune run --until` asked for."""
STATE_HOME = "XDG_STATE_HOME"
"""Environment variable: the folder in which programs keep state of their user, by default ~/.local/state."""
INDEX = "finetune/runs"
"""Folder of the index, relative to STATE_HOME."""


def find_runs(folder: Path = RUNS) -> list[Path]:
    """Return the folders of runs, sorted by name: the given folder, if it holds a run, and those directly in it."""
    files = [*folder.glob(PIPELINE_FILE), *folder.glob(f"*/{PIPELINE_FILE}")]
    return sorted(file.parent for file in files)


def run_named(name: str) -> Path | None:
    """Return the folder of the run of this name in RUNS, else in another folder; None if there is none.

    Raises UsageError if there are several in other folders.
    """
    for run in find_runs():
        if run.name == name:
            return run
    others = [run for run in runs_elsewhere() if run.name == name]
    if len(others) > 1:
        folders = ", ".join(map(str, others))
        raise UsageError(
            f"there are several runs {name} on this machine: choose one with --workdir: {folders}"
        )
    return others[0] if others else None


def named_elsewhere(name: str) -> list[Path]:
    """Return the run that its name alone means in another folder; empty if there is none, or if several have it."""
    if _holds_run(RUNS / name):
        return []
    runs = [run for run in runs_elsewhere() if run.name == name]
    return runs if len(runs) == 1 else []


def run_of_manifest(manifest: Path, name: str) -> Path | None:
    """Return the folder in which this manifest has run: in RUNS here, in the index, or beside it; None if nowhere."""
    here = RUNS / name
    if _holds_run(here):
        return here
    file = manifest.absolute()
    for run in (file.parent / RUNS / name, *runs_elsewhere()):
        if run.name == name and _holds_run(run) and manifest_of(run) == file:
            return run
    return None


def runs_elsewhere() -> list[Path]:
    """Return the runs of this user in the RUNS folders of other folders, sorted."""
    here = RUNS.absolute()
    runs = {run for run in _indexed() if run.parent != here and _holds_run(run)}
    return sorted(runs)


def remember(run: Path) -> None:
    """Add a run in a RUNS folder to the index, and forget the runs that no longer exist.

    A run with a folder of its own (--workdir) is not added: its user has chosen to name the folder.
    """
    index = _index()
    if run.parent.name != RUNS.name or index is None:
        return
    digest = hashlib.sha256(os.fsencode(run)).hexdigest()
    # The index is a convenience: a home that cannot be written must not stop the run.
    with contextlib.suppress(OSError):
        index.mkdir(parents=True, exist_ok=True)
        for link in index.iterdir():
            if not _holds_run(link):
                link.unlink(missing_ok=True)
        # A link and no file with all paths: two commands that write at once cannot lose each other's run.
        with contextlib.suppress(FileExistsError):
            (index / digest[:16]).symlink_to(run)


def _indexed() -> Iterator[Path]:
    index = _index()
    if index is None:
        return
    with contextlib.suppress(OSError):
        for link in index.iterdir():
            if link.is_symlink():
                yield link.readlink()


def _index() -> Path | None:
    """Return the folder of the index; None without a home."""
    given = os.environ.get(STATE_HOME, "")
    # As the specification of XDG has it: a relative path counts as unset.
    if given.startswith("/"):
        return Path(given, INDEX)
    # An unknown home raises no error here, and the path still begins with ~.
    usual = os.path.expanduser("~/.local/state")  # noqa: PTH111
    if not usual.startswith("/"):
        return None
    return Path(usual, INDEX)


def _holds_run(folder: Path) -> bool:
    try:
        return (folder / PIPELINE_FILE).is_file()
    except OSError:
        # A folder that this user may not enter.
        return False


def manifest_of(run: Path) -> Path | None:
    """Return the manifest that a run was started with last, or None if no path was recorded."""
    try:
        return Path((run / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def until_of(run: Path) -> str | None:
    """Return the last stage that the run was asked for, or None if it was asked for all."""
    try:
        return (run / UNTIL).read_text("utf-8") or None
    except (OSError, ValueError):
        return None
