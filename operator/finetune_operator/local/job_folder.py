"""A Job's folder, read: what the runner and the process wrote there, as facts."""

import fcntl
import json
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from finetune_operator.core.observation import JobState, ObservedJob
from finetune_operator.local.runner import ENDED, LOCK, PROGRESS, STARTED, TERMINATION
from finetune_trainer.contract import ContractModel, Failure, Progress, TerminationMessage

RUNNER_LOST = "the process that watched over it is gone: the machine was restarted, or someone killed it"

C = TypeVar("C", bound=ContractModel)


def observe_job(folder: Path) -> ObservedJob | None:
    """Give the Job as it is now, or None where it was never started."""
    ended = read_json(folder / ENDED)
    held = ended is None and is_locked(folder)
    ended = ended or read_json(folder / ENDED)  # it may have ended between the two looks
    started = read_json(folder / STARTED)
    if ended:
        return _finished(folder, started, ended)
    if held:
        state = JobState.RUNNING if started else JobState.WAITING
        return ObservedJob(
            folder.name, state, started_at=_time(started), progress=read_model(folder / PROGRESS, Progress)
        )
    return _finished(folder, started, {"code": None, "disruption": RUNNER_LOST}) if started else None


def _finished(folder: Path, started: dict[str, Any] | None, ended: dict[str, Any]) -> ObservedJob:
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
    return datetime.fromisoformat(record["at"]) if record and "at" in record else None


def is_locked(folder: Path) -> bool:
    """Whether a runner lives in this folder."""
    try:
        lock = (folder / LOCK).open()
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def read_json(path: Path) -> dict[str, Any] | None:
    """Give the object in a file, or None where there is no whole one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_message(path: Path) -> TerminationMessage | None:
    """Give the process's last words; where they are not what the stage contract says, what is wrong with them."""
    try:
        return TerminationMessage.model_validate_json(path.read_bytes())
    except OSError:
        return None
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in wrong["loc"])
        words = f"its termination message keeps not to the stage contract: {where}: {wrong['msg']}"
        return TerminationMessage(failure=Failure(message=words))


def read_model(path: Path, kind: type[C]) -> C | None:
    """Give what the process wrote, or None where it is not there or not what it should be."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
