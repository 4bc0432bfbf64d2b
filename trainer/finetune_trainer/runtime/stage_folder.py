"""What every stage's `run(config, context)` is handed, and how its end is made known."""

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.contract import (
    AnyConfig,
    AnyResult,
    Environment,
    EvaluateResult,
    Failure,
    TerminationMessage,
    parse_config,
)
from finetune_trainer.contract.results import TERMINATION_MESSAGE_BYTES
from finetune_trainer.files import write_durably
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.runtime.progress import ProgressReporter, log_line
from finetune_trainer.stop_signal import StopSignal

CONFIG = "config.json"
RESULT = "result.json"
LOCK = ".lock"
LOCK_TIMEOUT_SECONDS = 10
"""Seconds in which a process that has just been killed is gone for good."""


@dataclass(frozen=True)
class Context:
    """The surroundings of one stage's process."""

    environment: Environment
    folder: Path
    """The stage's own folder; everything it makes lies here, or is named by its result."""
    progress: ProgressReporter
    stop: StopSignal


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep every other process out of a stage's folder, whichever machine or run it belongs to.

    Raises ServiceUnavailable where one stays in it: a pod on a node that does not answer, a run in another work folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        for _ in range(LOCK_TIMEOUT_SECONDS):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(1)
            except OSError as error:
                log_line(f"{folder}: this file system has no locks ({error}); nothing keeps a second writer out")
                break
            else:
                break
        else:
            raise ServiceUnavailable(f"{folder}: another process works here; wait for it, or find out whose it is")
        yield


def write_config(folder: Path, config: AnyConfig) -> None:
    """Leave a stage's config beside what it makes, for the stages that tell of it."""
    write_durably(folder / CONFIG, config.model_dump_json(by_alias=True, indent=1).encode())


def read_config(folder: Path) -> AnyConfig | None:
    """Give the config of the stage whose folder this is, or None where there is none that can be read."""
    try:
        return parse_config((folder / CONFIG).read_text())
    except (OSError, ValidationError):
        return None


def write_result(folder: Path, result: AnyResult) -> None:
    """Say that the stage is done: the last thing written, when all that it speaks of is durable."""
    write_durably(folder / RESULT, result.model_dump_json(by_alias=True, indent=1).encode())


def read_result(folder: Path) -> AnyResult | None:
    """Give the result that an earlier process left here, or None where there is none that can be read."""
    try:
        found = json.loads((folder / RESULT).read_bytes())
        return TerminationMessage.model_validate({"result": found}).result
    except (OSError, ValueError, ValidationError):
        return None


def write_termination_message(environment: Environment, message: TerminationMessage) -> None:
    """Write the termination message, shortened where it would not fit."""
    while len(text := message.model_dump_json(by_alias=True, exclude_none=True).encode()) > TERMINATION_MESSAGE_BYTES:
        message = shrink_message(message)
    try:
        environment.termination_log.write_bytes(text)
    except OSError as error:
        log_line(f"cannot write {environment.termination_log}: {error}")


def shrink_message(message: TerminationMessage) -> TerminationMessage:
    """Leave out the progress, the second half of what went wrong, or the last metric of the task that has most."""
    if message.progress:
        return message.model_copy(update={"progress": None})
    if message.failure:
        words = message.failure.message[: len(message.failure.message) // 2] + " …"
        return message.model_copy(update={"failure": Failure(message=words)})
    if not isinstance(message.result, EvaluateResult):
        raise TypeError(f"a termination message of more than {TERMINATION_MESSAGE_BYTES} bytes: {message}")
    scores = message.result.scores
    task = max(scores, key=lambda name: len(scores[name]))
    *kept, last = scores[task]
    log_line(f"evaluate: {task} {last} is in results.json only: the termination message is full")
    fewer = scores | {task: {metric: scores[task][metric] for metric in kept}}
    return message.model_copy(update={"result": message.result.model_copy(update={"scores": fewer})})
