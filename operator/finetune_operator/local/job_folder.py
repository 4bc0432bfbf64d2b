"""Reads a Job's folder: what its runner and its process wrote there."""

import fcntl
import json
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from finetune_operator.core.observation import JobState, ObservedJob
from finetune_operator.local.runner import ENDED, LOCK, PROGRESS, STARTED, TERMINATION
from finetune_trainer.contract import (
    ContractModel,
    Failure,
    Progress,
    TerminationMessage,
)

RUNNER_LOST = "its runner is gone and recorded no exit code: the machine may have been restarted, or the runner killed"

C = TypeVar("C", bound=ContractModel)


def observe_job(folder: Path) -> ObservedJob | None:
    """Return the current state of the Job, or None if it never started."""
    ended = read_json(folder / ENDED)
    locked = ended is None and is_locked(folder)
    if ended is None:
        # Again: the Job may have ended between the two reads.
        ended = read_json(folder / ENDED)
    started = read_json(folder / STARTED)
    if ended:
        return _finished(folder, started, ended)
    if locked:
        state = JobState.RUNNING if started else JobState.WAITING
        return ObservedJob(
            folder.name,
            state,
            started_at=_time(started),
            progress=read_model(folder / PROGRESS, Progress),
        )
    if not started:
        return None
    # A lost runner is no failure of the stage: the attempt counts as interrupted.
    return _finished(folder, started, {"code": None, "disruption": RUNNER_LOST})


def _finished(
    folder: Path, started: dict[str, Any] | None, ended: dict[str, Any]
) -> ObservedJob:
    return ObservedJob(
        name=folder.name,
        state=JobState.COMPLETE if ended["code"] == 0 else JobState.FAILED,
        started_at=_time(started),
        finished_at=_time(ended),
        exit_code=ended["code"],
        disruption=ended["disruption"],
        message=read_message(folder / TERMINATION),
        progress=read_model(folder / PROGRESS, Progress),
    )


def _time(record: dict[str, Any] | None) -> datetime | None:
    if record is None or "at" not in record:
        return None
    return datetime.fromisoformat(record["at"])


def is_locked(folder: Path) -> bool:
    """Return whether a runner holds the lock of this folder."""
    try:
        lock = (folder / LOCK).open()
    except OSError:
        return False
    with lock:
        try:
            # Shared: two readers would take each other for the runner.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, invalid or no object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    return content


def read_message(path: Path) -> TerminationMessage | None:
    """Return the process's termination message, or None if it left none.

    A message that violates the stage contract is replaced by a failure that names the first violation.
    """
    try:
        return TerminationMessage.model_validate_json(path.read_bytes())
    except OSError:
        return None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        message = f"its termination message violates the stage contract: {field}: {problem['msg']}"
        return TerminationMessage(failure=Failure(message=message))


def read_model(path: Path, kind: type[C]) -> C | None:
    """Return what the process wrote, or None if the file is missing or violates the stage contract."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
