"""The folder of checkpoints: when one is due, how it comes to lie there, which one can be used."""

import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from finetune_trainer.contract import Checkpoint
from finetune_trainer.runtime import artifacts, progress
from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.training.checkpoint_format import Layout, Snapshot, read_files, write_files

STEP_FOLDER = re.compile(r"step-[0-9]{8,}")

BROKEN = (CorruptArtifact, OSError, ValueError, RecursionError)
"""What reading a folder that anything may have happened to can raise."""


def say(words: str) -> None:
    """Put a line into the log."""
    progress.log_line(f"train: {words}")


class CheckpointManager:
    """Saves beside the training, in one thread, one checkpoint at a time.

    Training is held up while a snapshot is copied and not while it is written. A folder is named step-…
    only when it is whole and durable. Close it, or leave its `with`, before the process ends.
    """

    def __init__(self, folder: Path, rule: Checkpoint, about: dict[str, str], adapter_config: bytes) -> None:
        self._folder, self._rule, self._about, self._adapter_config = folder, rule, about, adapter_config
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._trouble: OSError | None = None
        self._broken: set[str] = set()
        self._begun_step = 0
        self._begun_at = time.monotonic()
        self.saved_step: int | None = None
        """The newest step that survives a kill."""
        _prepare_folder(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self._wait()

    def load_latest(self, layout: Layout) -> Snapshot | None:
        """Read the newest checkpoint that is whole and of this run.

        Each one that is not is named in the log with what is wrong with it. None where there is no other.
        """
        found = self._latest_first()
        for folder in found:
            try:
                self._verify(folder)
                snapshot = read_files(folder, layout)
                self._is_at(folder, snapshot.state.step)
            except BROKEN as error:
                self._broken.add(folder.name)
                say(f"checkpoint {folder.name} is broken and not used: {error}")
                continue
            self._begun_step = self.saved_step = snapshot.state.step
            return snapshot
        if found:
            say(f"none of {len(found)} checkpoints can be used: training starts from the beginning")
        return None

    def _latest_first(self) -> list[Path]:
        named = [folder for folder in self._folder.iterdir() if STEP_FOLDER.fullmatch(folder.name)]
        return sorted(named, key=_step_of, reverse=True)

    def _verify(self, folder: Path) -> None:
        """Raise Damaged unless this is a sealed folder of this run and of the step it is named after."""
        if not folder.is_dir():
            raise CorruptArtifact(f"{folder.name} is no folder")
        about = artifacts.verify(folder)
        for name in ("identity", "rows"):
            if about.get(name) != self._about[name]:
                raise CorruptArtifact(
                    f"{folder.name} is of another run: {name} {about.get(name)}, not {self._about[name]}"
                )
        self._is_at(folder, about.get("step"))

    def _is_at(self, folder: Path, step: object) -> None:
        if step != _step_of(folder):
            raise CorruptArtifact(f"{folder.name} is not of the step it is named after: it says {step}")

    def should_save(self, step: int) -> bool:
        """Say whether a checkpoint is due; while one is being written the next one waits for a later boundary."""
        if step == self._begun_step or not self._idle():
            return False
        seconds = self._rule.every_seconds
        passed = step // self._rule.every_steps > self._begun_step // self._rule.every_steps
        return passed or (seconds is not None and time.monotonic() - self._begun_at >= seconds)

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot; a disk that does not take it is said in the log, and training goes on."""
        self._wait()
        self._begun_step, self._begun_at, self._trouble = snapshot.state.step, time.monotonic(), None
        self._writing = self._thread.submit(self._write, snapshot)

    def save_blocking(self, step: int, snapshot: Callable[[], Snapshot]) -> int | None:
        """Have this step on the disk before returning, and give the step that is; None at the very beginning.

        Raises ServiceUnavailable where the disk does not take it.
        """
        self._wait()
        if step not in {0, self.saved_step}:
            self.save(snapshot())
            self._wait()
        if self._trouble:
            older = f"step {self.saved_step}" if self.saved_step else "the beginning"
            raise ServiceUnavailable(
                f"asked to stop at step {step}, but its checkpoint cannot be written ({self._trouble}): "
                f"make room in {self._folder} or enlarge spec.workspace.size; training goes on from {older}"
            ) from self._trouble
        return self.saved_step

    def _idle(self) -> bool:
        if self._writing is not None and self._writing.done():
            self._wait()
        return self._writing is None

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, snapshot: Snapshot) -> None:
        step = snapshot.state.step
        folder = self._folder / f"step-{step:08d}"
        try:
            with artifacts.atomic_folder(folder) as temporary:
                write_files(temporary, snapshot, self._adapter_config)
                artifacts.seal(temporary, {**self._about, "step": step})
                _remove(folder)  # only a broken one can have this name
        except OSError as error:
            self._trouble = error
            say(f"checkpoint {folder.name} cannot be written: {error}; training goes on without it")
            return
        self.saved_step = step
        self._broken.discard(folder.name)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Keep so many of the newest; broken ones go as soon as a whole one is newer."""
        older = [folder for folder in self._latest_first() if _step_of(folder) <= newest]
        whole = [folder for folder in older if folder.name not in self._broken]
        for folder in set(older) - set(whole[: self._rule.keep]):
            _remove(folder)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _prepare_folder(folder: Path) -> None:
    """Make the folder, without what killed processes have left half-written in it."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        aside = folder.with_name(f"{folder.name}.not-a-folder")
        say(f"{folder} is no folder: it was moved to {aside.name}")
        folder.replace(aside)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):
        say(f"{leftover.name} was never finished: removed")
        _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
