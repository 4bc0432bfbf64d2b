"""Run a stage as its container does: config in the environment, result in the termination message."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from finetune_trainer.contract import (
    AnyConfig,
    Environment,
    ExitCode,
    StageResult,
    TerminationMessage,
)
from finetune_trainer.contract.environment import CONFIG
from finetune_trainer.runtime.entrypoint import run_stage

R = TypeVar("R", bound=StageResult)
TRAINER = Path(__file__).parents[3] / "trainer"


def environment_in(folder: Path) -> Environment:
    """Create the folders of a local run below a folder and return their environment."""
    for name in ("workspace", "claims", "manifest"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return Environment(
        workspace=folder / "workspace",
        claims=folder / "claims",
        manifest_dir=folder / "manifest",
        termination_log=folder / "termination-log",
        progress_file=folder / "progress.json",
    )


def run_in_process(
    config: AnyConfig, environment: Environment
) -> tuple[TerminationMessage, ExitCode]:
    """Run a stage in this process, which saves the seconds of imports of a new process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONFIG, config.model_dump_json(by_alias=True))
        return run_stage(config.stage, environment)


def start_stage(
    config: AnyConfig,
    environment: Environment,
    *,
    prefix: Sequence[str] = (),
    **variables: str,
) -> subprocess.Popen[str]:
    """Start a stage in a new process with its own process group; `prefix` is the command that starts it."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "finetune_trainer", config.stage],
        env={
            **os.environ,
            **environment.variables(),
            "PYTHONPATH": str(TRAINER),
            "OMP_NUM_THREADS": "1",
            CONFIG: config.model_dump_json(by_alias=True),
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_termination_message(environment: Environment) -> TerminationMessage:
    return TerminationMessage.model_validate_json(
        environment.termination_log.read_text()
    )


def read_progress(environment: Environment) -> dict[str, object]:
    assert environment.progress_file
    progress: dict[str, object] = json.loads(environment.progress_file.read_text())
    return progress


def run_to_result(config: AnyConfig, environment: Environment, kind: type[R]) -> R:
    """Run a stage that must succeed, and return its result."""
    message, code = run_in_process(config, environment)
    assert code == ExitCode.DONE, message.failure
    assert isinstance(message.result, kind)
    return message.result


def run_to_failure(config: AnyConfig, environment: Environment) -> tuple[str, ExitCode]:
    """Run a stage that must fail, and return the message of its failure and its exit code."""
    message, code = run_in_process(config, environment)
    assert message.failure, message
    return message.failure.message, code
