"""The checkpoint manager: decides when a checkpoint is due, writes it, prunes old checkpoints and loads the latest."""

import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from finetune_trainer.contract import Checkpoint
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import MachineUnable
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.machine.space import more_space
from finetune_trainer.runtime.progress import progress
from finetune_trainer.runtime.progress.early_save import EarlySave
from finetune_trainer.training.checkpoints.format import (
    Layout,
    Snapshot,
    read_files,
    write_files,
)
from finetune_trainer.training.methods.trainable import WeightsFormat

# Eight digits or more: `folder_of` writes more only from step 100,000,000 on.
STEP_FOLDER = re.compile(r"step-[0-9]{8,}")

# RecursionError: a damaged JSON file may be nested too deeply for the parser.
READ_ERRORS = (CorruptArtifact, OSError, ValueError, RecursionError)
"""Exceptions that reading a checkpoint folder with arbitrary damage can raise."""


def log_line(text: str) -> None:
    """Write a line to the stage's log."""
    progress.log_line(f"train: {text}")


class CheckpointManager:
    """Saves checkpoints asynchronously: a single background thread writes them in their order.

    Training waits while a snapshot is copied, but not while it is written. A folder gets its name step-… only when
    it is complete and durable, and after `sync_metrics`, so that no checkpoint lacks the metrics of its steps, unless
    these could not be written. Use it as a context manager: leaving the block waits for the last write.
    """

    def __init__(
        self,
        folder: Path,
        rule: Checkpoint,
        base: BaseModel,
        metadata: dict[str, str],
        weights_format: WeightsFormat,
        *,
        sync_metrics: Callable[[], None] = lambda: None,
        early_save: EarlySave | None = None,
        fence: Fence = UNFENCED,
    ) -> None:
        self._folder = folder
        self._rule = rule
        self._base = base
        self._format = weights_format
        self._sync_metrics = sync_metrics
        self._early_save = early_save or EarlySave()
        self._fence = fence
        self._metadata = {**metadata, "model": base.digest}
        # A single thread: checkpoints become durable in the order of their steps.
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending_write: Future[None] | None = None
        self._write_error: OSError | None = None
        """Why the newest checkpoint could not be written."""
        self._corrupt: set[str] = set()
        """Names of folders that `load_latest` skipped."""
        self._last_step = 0
        """The step of the last snapshot, whether loaded, written or being written."""
        self._last_time = time.monotonic()
        """When writing the last snapshot began; at first, when this process began."""
        self.saved_step: int | None = None
        """The newest step whose checkpoint is durable, so that it survives a kill."""
        # Before anything is removed: a newer attempt may have the folder, and be writing these checkpoints.
        fence.check()
        _prepare_folder(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(wait=True)
        # Another exception is more important than an error of the writer.
        if kind is None:
            self._wait_for_write()

    def load_latest(self, layout: Layout) -> Snapshot | None:
        """Return the latest checkpoint that is complete and belongs to this run, or None if there is none.

        Logs every checkpoint that it skips, with the reason. Raises ConfigInvalid if it is of another base model.
        """
        folders = self._latest_first()
        for folder in folders:
            try:
                self._verify(folder)
                snapshot = read_files(folder, layout)
                self._check_step(folder, snapshot.state.step)
            except READ_ERRORS as error:
                self._corrupt.add(folder.name)
                log_line(
                    f"checkpoint {folder.name} is corrupt and was skipped: {error}"
                )
                continue
            # What was read is durable, so it need not be written again at this boundary.
            self._last_step = self.saved_step = snapshot.state.step
            return snapshot
        if folders:
            log_line(
                f"none of {len(folders)} checkpoints is usable: training starts from the beginning"
            )
        return None

    def _latest_first(self) -> list[Path]:
        folders = [
            folder
            for folder in self._folder.iterdir()
            if STEP_FOLDER.fullmatch(folder.name)
        ]
        return sorted(folders, key=_step_of, reverse=True)

    def _verify(self, folder: Path) -> None:
        """Raise CorruptArtifact unless this is a sealed folder of this run and of the step in its name."""
        if not folder.is_dir():
            raise CorruptArtifact(f"{folder.name} is not a folder")
        metadata = artifacts.verify(folder)
        for name in ("identity", "rows"):
            if metadata.get(name) != self._metadata[name]:
                raise CorruptArtifact(
                    f"{folder.name} belongs to another run: {name} {metadata.get(name)}, not {self._metadata[name]}"
                )
        self._check_step(folder, metadata.get("step"))
        self._base.require(metadata.get("model"), f"checkpoint {folder.name}")

    def _check_step(self, folder: Path, step: object) -> None:
        if step != _step_of(folder):
            raise CorruptArtifact(
                f"{folder.name} holds step {step}, not the step in its name"
            )

    def should_save(self, step: int) -> bool:
        """Return whether a checkpoint is due, or an early checkpoint was requested.

        While a checkpoint is being written, the next waits for a later boundary.
        """
        if step == self._last_step or self._is_writing():
            return False
        if self._early_save.take():
            return True
        # Not `step % every_steps == 0`: a multiple may have passed while the previous checkpoint was written.
        passed = (
            step // self._rule.every_steps > self._last_step // self._rule.every_steps
        )
        return passed or time.monotonic() - self._last_time >= self._rule.every_seconds

    def lacks(self, step: int) -> bool:
        """Return whether the state at this boundary has been neither saved nor handed to the writer."""
        return step not in {0, self._last_step} or self._write_error is not None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot in the background. A write error is logged, and training continues.

        Raise Replaced if the write before it found that a newer attempt has the folder.
        """
        self._wait_for_write()
        self._last_step = snapshot.state.step
        self._last_time = time.monotonic()
        self._write_error = None
        self._pending_write = self._executor.submit(self._write, snapshot)

    def save_blocking(
        self, step: int, snapshot: Callable[[], Snapshot] | None
    ) -> int | None:
        """Make this step durable and return the newest durable step, or None before the first step.

        Without `snapshot` the step must have been handed to the writer, and a failed write is not tried again. Raises
        MachineUnable if the checkpoint cannot be written, Replaced if a newer attempt has the folder.
        """
        self._wait_for_write()
        if snapshot and step not in {0, self.saved_step}:
            self.save(snapshot())
            self._wait_for_write()
        if self._write_error:
            restart = "start from the beginning"
            if self.saved_step:
                restart = f"resume from step {self.saved_step}"
            raise MachineUnable(
                f"stop requested at step {step}, but its checkpoint cannot be written ({self._write_error}): "
                f"{more_space()} in {self._folder}; training will {restart}"
            ) from self._write_error
        return self.saved_step

    def finish_write(self) -> int | None:
        """Wait for the write in progress, if any, and return the newest durable step.

        Raise Replaced if the write found that a newer attempt has the folder.
        """
        self._wait_for_write()
        return self.saved_step

    def _is_writing(self) -> bool:
        if self._pending_write is not None and self._pending_write.done():
            self._wait_for_write()
        return self._pending_write is not None

    def _wait_for_write(self) -> None:
        """Wait for the write in progress, if any, and raise its error unless it is an OSError, which is logged."""
        pending = self._pending_write
        # Forget the write first: its error must be raised once, not again when the context is left.
        self._pending_write = None
        if pending is not None:
            pending.result()

    def _write(self, snapshot: Snapshot) -> None:
        step = snapshot.state.step
        folder = folder_of(self._folder, step)
        # First, because no checkpoint may lack the metrics of its steps.
        self._sync_metrics()
        try:
            with artifacts.atomic_folder(folder, fence=self._fence) as temporary:
                write_files(temporary, snapshot, self._format)
                artifacts.seal(temporary, {**self._metadata, "step": step})
                # Writing may have taken long: the name may belong to a newer attempt by now.
                self._fence.check()
                # Only a corrupt checkpoint can have this name.
                _remove(folder)
        except OSError as error:
            self._write_error = error
            log_line(
                f"checkpoint {folder.name} cannot be written: {error}; training continues without it"
            )
            return
        # From here on the checkpoint survives a kill, so older checkpoints may go.
        self.saved_step = step
        self._corrupt.discard(folder.name)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Keep the `keep` newest checkpoints up to `newest`, and remove older corrupt checkpoints."""
        older = [
            folder for folder in self._latest_first() if _step_of(folder) <= newest
        ]
        # A corrupt checkpoint must not count as a kept checkpoint in place of an intact checkpoint.
        intact = [folder for folder in older if folder.name not in self._corrupt]
        for folder in set(older) - set(intact[: self._rule.keep]):
            self._fence.check()
            _remove(folder)


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return checkpoints / f"step-{step:08d}"


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _prepare_folder(folder: Path) -> None:
    """Create the folder if needed, and remove unfinished checkpoints of killed processes."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        backup = folder.with_name(f"{folder.name}.not-a-folder")
        log_line(f"{folder} is not a folder: moved it to {backup.name}")
        folder.replace(backup)
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".step-*"):
        # The pattern also matches lock files, which are removed without a message.
        if unfinished.is_dir():
            log_line(f"removed the unfinished checkpoint {unfinished.name}")
        _remove(unfinished)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
