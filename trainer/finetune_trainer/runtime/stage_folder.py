"""The folder of a stage: its lock, its config and its result; and the process's termination message."""

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
"""Time to wait for the lock; a process that was just killed releases it within this time."""


@dataclass(frozen=True)
class Context:
    """Runtime services of one stage, passed to its `run(config, context)`."""

    environment: Environment
    folder: Path
    """The stage's folder; all its output is in here, or is named by its result."""
    progress: ProgressReporter
    stop: StopSignal


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock a stage's folder against other processes, also those of other machines and other runs.

    Raise ServiceUnavailable if another process keeps the lock longer than LOCK_TIMEOUT_SECONDS. That process may be
    a pod on an unreachable node, or a local run with another work folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        for _ in range(LOCK_TIMEOUT_SECONDS):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(1)
            except OSError as error:
                log_line(f"{folder}: this file system has no locks ({error}); a second writer cannot be kept out")
                break
            else:
                break
        else:
            raise ServiceUnavailable(f"{folder} is locked by another process; wait for it to end, or stop it")
        yield


def write_config(folder: Path, config: AnyConfig) -> None:
    """Write a stage's config to its folder; push reads it for the model card."""
    write_durably(folder / CONFIG, config.model_dump_json(by_alias=True, indent=1).encode())


def read_config(folder: Path) -> AnyConfig | None:
    """Return the config in a stage's folder, or None if it is missing or invalid."""
    try:
        return parse_config((folder / CONFIG).read_text())
    except (OSError, ValidationError):
        return None


def write_result(folder: Path, result: AnyResult) -> None:
    """Write the result, which marks the stage as done; call this last, when all output is durable."""
    write_durably(folder / RESULT, result.model_dump_json(by_alias=True, indent=1).encode())


def read_result(folder: Path) -> AnyResult | None:
    """Return the result in a stage's folder, or None if it is missing or invalid."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        return TerminationMessage.model_validate({"result": result}).result
    except (OSError, ValueError, ValidationError):
        return None


def write_termination_message(environment: Environment, message: TerminationMessage) -> None:
    """Write the termination message, shrunk to TERMINATION_MESSAGE_BYTES if necessary."""
    while len(data := message.model_dump_json(by_alias=True, exclude_none=True).encode()) > TERMINATION_MESSAGE_BYTES:
        message = shrink_message(message)
    try:
        environment.termination_log.write_bytes(data)
    except OSError as error:
        log_line(f"cannot write {environment.termination_log}: {error}")


def shrink_message(message: TerminationMessage) -> TerminationMessage:
    """Remove the least important part of a message.

    That is the progress, else the second half of the failure, else the last metric of the task with most metrics.
    Raise TypeError if the message has none of these.
    """
    if message.progress:
        return message.model_copy(update={"progress": None})
    if message.failure:
        text = message.failure.message[: len(message.failure.message) // 2] + " …"
        return message.model_copy(update={"failure": Failure(message=text)})
    if not isinstance(message.result, EvaluateResult):
        raise TypeError(f"a termination message of more than {TERMINATION_MESSAGE_BYTES} bytes: {message}")
    scores = message.result.scores
    task = max(scores, key=lambda name: len(scores[name]))
    *kept, last = scores[task]
    log_line(f"evaluate: the termination message is full; {task} {last} is only in results.json")
    fewer = scores | {task: {metric: scores[task][metric] for metric in kept}}
    return message.model_copy(update={"result": message.result.model_copy(update={"scores": fewer})})
