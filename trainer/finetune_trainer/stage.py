"""What every stage's `run(config, context)` is handed, and how its end is made known."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.contract import AnyConfig, AnyResult, Environment, TerminationMessage, parse_config
from finetune_trainer.contract.results import TERMINATION_MESSAGE_BYTES
from finetune_trainer.files import write_durably
from finetune_trainer.interruption import StopSignal
from finetune_trainer.progress import ProgressReporter

CONFIG = "config.json"
RESULT = "result.json"


@dataclass(frozen=True)
class Context:
    """The surroundings of one stage's process."""

    environment: Environment
    folder: Path
    """The stage's own folder; everything it makes lies here, or is named by its result."""
    progress: ProgressReporter
    stop: StopSignal


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


def leave_message(environment: Environment, message: TerminationMessage) -> None:
    """Write the termination message, shortened where it would not fit."""
    text = message.model_dump_json(by_alias=True, exclude_none=True)
    if len(text.encode()) > TERMINATION_MESSAGE_BYTES and message.failure:
        words = message.failure.message.encode()[: TERMINATION_MESSAGE_BYTES // 2].decode(errors="ignore")
        failure = message.failure.model_copy(update={"message": words + " …"})
        text = message.model_copy(update={"failure": failure}).model_dump_json(by_alias=True, exclude_none=True)
    try:
        environment.termination_log.write_text(text)
    except OSError as error:
        print(f"cannot write {environment.termination_log}: {error}", flush=True)
