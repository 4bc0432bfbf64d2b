"""The workspaces of the runs on this machine."""

import argparse
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.arguments import find_workdir
from finetune_cli.local.summary import run_argument
from finetune_cli.output.table import aligned
from finetune_cli.runs import find_runs
from finetune_operator.api.spec import STAGES
from finetune_operator.core.durations import format_duration
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.local.cluster import Folders
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.local.runner import LOCK
from finetune_trainer.result_folders import (
    ResultFolder,
    Unused,
    names_in,
    result_folders,
)
from finetune_trainer.sizes import format_size

COLUMNS = ("RUN", "FOLDER", "SIZE", "AGE", "USE")
STAGE_NAMES = tuple(kind.name for kind in STAGES)
IN_USE = "in use"
KEPT = "unused, stays"
SURPLUS = "unused, can go"
FOREIGN = "another pipeline may use it"
SHARED = "used by all stages"


@dataclass(frozen=True)
class Listed:
    """A folder in a workspace."""

    run: str
    folder: str
    """Path in the workspace: STAGE/IDENTITY for a result."""
    size: int
    """Bytes in its files."""
    age_seconds: int
    """Time since it was used."""
    use: str


@dataclass(frozen=True)
class RunWorkspace:
    """The workspace of a run on this machine."""

    run: Path
    pipeline: Pipeline
    keep: int | None
    """Unused results of each stage that stay; None: as the manifest says."""

    @property
    def folder(self) -> Path:
        """The folder that represents the volume."""
        return Folders.under(self.run, self.run).workspace(self.pipeline)

    @property
    def unused(self) -> Unused:
        """The rule for results that nothing uses."""
        workspace = self.pipeline.spec.workspace
        status = self.pipeline.status
        named = {f"{name}/{stage.identity}" for name, stage in status.stages.items()}
        for name, attempt in status.running_attempts().items():
            named.add(f"{name}/{attempt.identity}")
        keep = workspace.unused_kept if self.keep is None else self.keep
        return Unused(
            self.folder,
            STAGE_NAMES,
            frozenset(named) | names_in(self.pipeline.spec.source_uris()),
            keep,
            self.pipeline.uid,
            shared=bool(workspace.existing_claim),
        )

    def listed(self, now: float) -> Iterator[Listed]:
        """Yield the folders in the workspace, results first."""
        unused = self.unused
        kept = {folder.name for folder in unused.folders()}
        surplus = {folder.name for folder in unused.surplus()}
        for folder in result_folders(self.folder, STAGE_NAMES):
            use = IN_USE
            if folder.name in surplus:
                use = SURPLUS
            elif folder.name in kept:
                use = KEPT
            elif folder.name not in unused.named:
                use = FOREIGN
            yield self._listed(folder, use, now)
        for path in sorted(self.folder.glob("*")):
            if path.name not in STAGE_NAMES:
                yield self._listed(ResultFolder(path), SHARED, now)

    def _listed(self, folder: ResultFolder, use: str, now: float) -> Listed:
        name = str(folder.path.relative_to(self.folder))
        age = max(int(now - folder.used_at), 0)
        return Listed(str(self.run), name, size_of(folder.path), age, use)

    def prune(self) -> tuple[int, int]:
        """Delete the unused results that do not stay; return their number and bytes."""
        unused = self.unused
        sizes = {folder.name: size_of(folder.path) for folder in unused.surplus()}
        removed = [sizes.get(folder.name, 0) for folder in unused.prune()]
        return len(removed), sum(removed)


def run(arguments: argparse.Namespace) -> int:
    """Print the list of one run or of all; with --prune, delete first."""
    runs = find_runs()
    if arguments.name or arguments.workdir:
        runs = [find_workdir(arguments.name, arguments.workdir)]
    workspaces = list(_workspaces(runs, arguments.keep))
    if arguments.prune:
        for workspace in workspaces:
            _prune(workspace)
        return 0
    now = datetime.now(UTC).timestamp()  # noqa: TID251  an edge
    listed = [list(workspace.listed(now)) for workspace in workspaces]
    if arguments.json:
        records = [asdict(folder) for folders in listed for folder in folders]
        print(json.dumps(records, indent=1))
        return 0
    rows = [_row(folder) for folders in listed for folder in folders]
    if not rows:
        print("the workspaces are empty")
        return 0
    for line in aligned([COLUMNS, *rows]):
        print(line)
    for workspace, folders in zip(workspaces, listed, strict=True):
        for line in _hint(workspace, folders, arguments.keep):
            print(line)
    return 0


def _workspaces(runs: list[Path], keep: int | None) -> Iterator[RunWorkspace]:
    for folder in runs:
        try:
            pipeline = PipelineFile(folder).read()
        except ClusterError as error:
            # Without the status, it is not known what is used.
            print(f"{error}; its workspace is left alone")
            continue
        if pipeline:
            yield RunWorkspace(folder, pipeline, keep)


def _row(folder: Listed) -> tuple[str, ...]:
    run = Path(folder.run).name
    age = format_duration(folder.age_seconds)
    return (run, folder.folder, format_size(folder.size), age, folder.use)


def _hint(
    workspace: RunWorkspace, folders: list[Listed], keep: int | None
) -> Iterator[str]:
    """Yield how to delete what can go."""
    size = sum(folder.size for folder in folders if folder.use == SURPLUS)
    if size:
        flag = "" if keep is None else f" --keep {keep}"
        command = f"finetune workspaces {run_argument(workspace.run)} --prune{flag}"
        yield f"{workspace.run.name}: {format_size(size)} can go; to delete it: {command}"


def _prune(workspace: RunWorkspace) -> None:
    name = workspace.run.name
    with _locked(workspace.run) as is_free:
        if not is_free:
            print(f"{name}: `finetune run` works on it, so nothing was deleted")
            return
        number, freed = workspace.prune()
    print(f"{name}: deleted {number} unused results, {format_size(freed)}")


@contextmanager
def _locked(run: Path) -> Iterator[bool]:
    """Hold the lock of a run, so that no `finetune run` starts meanwhile; yield False if it works on the run."""
    with (run / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def size_of(folder: Path) -> int:
    """Return the bytes in the files of a folder, or of a file; links count as nothing."""
    if not folder.is_dir() or folder.is_symlink():
        return folder.lstat().st_size
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                about = os.lstat(Path(parent, name))
            except FileNotFoundError:
                # A process works in the folder.
                continue
            # A file may have several names.
            sizes[about.st_ino] = about.st_size
    return sum(sizes.values())
