"""The runs on this machine: each is a folder with the pipeline and the path of its manifest."""

from pathlib import Path

from finetune_operator.local.file_names import PIPELINE_FILE

RUNS = Path(".finetune")
"""Folder of the runs on this machine, relative to the current folder."""
MANIFEST = "manifest"
"""File in the folder of a run with the absolute path of its manifest."""


def find_runs(folder: Path = RUNS) -> list[Path]:
    """Return the folders of runs, sorted by name: the given folder, if it holds a run, and those directly in it."""
    files = [*folder.glob(PIPELINE_FILE), *folder.glob(f"*/{PIPELINE_FILE}")]
    return sorted(file.parent for file in files)


def run_named(name: str) -> Path | None:
    """Return the folder of the run of this name in RUNS, or None."""
    for run in find_runs():
        if run.name == name:
            return run
    return None


def manifest_of(run: Path) -> Path | None:
    """Return the manifest that a run was started with last, or None if no path was recorded."""
    try:
        return Path((run / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None
