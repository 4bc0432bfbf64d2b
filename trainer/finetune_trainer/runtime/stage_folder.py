"""The folder of a stage: its lock, its config and its result; and the process's termination message."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.contract import (
    AnyConfig,
    AnyResult,
    Environment,
    EvaluateResult,
    TerminationMessage,
    parse_config,
)
from finetune_trainer.contract.results import TERMINATION_MESSAGE_BYTES
from finetune_trainer.files import remove_temporary_files, write_durably
from finetune_trainer.result_folders import LOCK, RESULT, record_user
from finetune_trainer.runtime.errors import Replaced
from finetune_trainer.runtime.fence import (
    UNFENCED,
    Attempt,
    Fence,
    SilentHolder,
    take_token,
)
from finetune_trainer.runtime.locks import locked
from finetune_trainer.runtime.progress.progress import ProgressReporter, log_line
from finetune_trainer.stop_signal import StopSignal

CONFIG = "config.json"


@dataclass(frozen=True)
class Context:
    """Runtime services of a stage, passed to its `run(config, context)`."""

    environment: Environment
    folder: Path
    """The stage's folder; all its output is in here, or its result names it."""
    progress: ProgressReporter
    stop: StopSignal
    fence: Fence = UNFENCED
    """Checked before anything in the folder is published."""


@contextlib.contextmanager
def exclusive(
    folder: Path,
    attempt: Attempt | None = None,
    on_replaced: Callable[[Replaced], None] = lambda _: None,
) -> Iterator[Fence]:
    """Lock and fence a stage's folder against other processes, also processes of other machines and other runs.

    A process that is frozen or cut off loses the lock after SILENT_SECONDS. If this happens to this process, a thread
    calls `on_replaced`. Raise Replaced if a later attempt has the folder, and ServiceUnavailable if another process
    keeps the lock longer than LOCK_TIMEOUT_SECONDS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    attempt = attempt or Attempt()
    lock = folder / LOCK
    is_silent = SilentHolder(folder, lock, attempt)
    with locked(lock, "another run of this stage in this folder", is_silent):
        record_user(folder, attempt.pipeline)
        # The lock only saves work. The token keeps other processes out, also on a file system without locks.
        fence = take_token(folder, attempt)
        for name in (CONFIG, RESULT):
            remove_temporary_files(folder / name)
        with fence.heartbeats(lock, on_replaced):
            yield fence


def write_config(folder: Path, config: AnyConfig, fence: Fence = UNFENCED) -> None:
    """Write a stage's config to its folder; push reads it for the model card. Raise Replaced behind the fence."""
    text = config.model_dump_json(by_alias=True, indent=1)
    write_durably(folder / CONFIG, text.encode(), fence.check)


def read_config(folder: Path) -> AnyConfig | None:
    """Return the config in a stage's folder, or None if it is missing or invalid."""
    try:
        return parse_config((folder / CONFIG).read_text())
    except (OSError, ValidationError):
        return None


def write_result(folder: Path, result: AnyResult, fence: Fence = UNFENCED) -> None:
    """Write the result, which marks the stage as done; call this last, when all output is durable.

    Raise Replaced behind the fence.
    """
    text = result.model_dump_json(by_alias=True, indent=1)
    write_durably(folder / RESULT, text.encode(), fence.check)


def read_result(folder: Path) -> AnyResult | None:
    """Return the result in a stage's folder, or None if it is missing or invalid."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        return TerminationMessage.model_validate({"result": result}).result
    except (OSError, ValueError, ValidationError):
        return None


def write_termination_message(
    environment: Environment, message: TerminationMessage
) -> None:
    """Write the termination message, shrunk to TERMINATION_MESSAGE_BYTES if necessary."""
    data = _encoded(message)
    # The kubelet cuts a longer message, which would not be JSON any more.
    while len(data) > TERMINATION_MESSAGE_BYTES:
        message = shrink_message(message)
        data = _encoded(message)
    try:
        environment.termination_log.write_bytes(data)
    except OSError as error:
        log_line(f"cannot write {environment.termination_log}: {error}")


def _encoded(message: TerminationMessage) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_none=True).encode()


def shrink_message(message: TerminationMessage) -> TerminationMessage:
    """Remove the least important part of a message.

    This part is the progress, else the second half of the failure, else the last metric of the task with most metrics.
    Raise TypeError if the message has none of these.
    """
    if message.progress:
        return message.model_copy(update={"progress": None})
    if message.failure:
        # The first half names the failure.
        text = message.failure.message
        shorter = text[: len(text) // 2] + " …"
        failure = message.failure.model_copy(update={"message": shorter})
        return message.model_copy(update={"failure": failure})
    if not isinstance(message.result, EvaluateResult):
        raise TypeError(
            f"a termination message of more than {TERMINATION_MESSAGE_BYTES} bytes: {message}"
        )
    scores = message.result.scores
    task = max(scores, key=lambda name: len(scores[name]))
    metrics = dict(scores[task])
    last, _ = metrics.popitem()
    log_line(
        f"evaluate: the termination message is full; {task} {last} is only in results.json"
    )
    result = message.result.model_copy(update={"scores": scores | {task: metrics}})
    return message.model_copy(update={"result": result})
