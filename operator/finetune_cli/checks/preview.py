"""Previews the data in a process of the trainer, which has the environment of the stage prepare."""

from collections.abc import Mapping
from contextlib import suppress

from pydantic import ValidationError

from finetune_cli.checks.store_access import environment_of
from finetune_cli.checks.trainer_process import run_module
from finetune_trainer.contract import Environment
from finetune_trainer.contract.preview import (
    PreviewProblem,
    PreviewReport,
    PreviewRequest,
)
from finetune_trainer.exit_codes import ExitCode

MODULE = "finetune_trainer.preview"
# Millions of records take minutes. Without a limit, a store that does not answer would hold the command for ever.
LONGEST_SECONDS = 3600.0
"""Longest time for a preview."""
MISSING_PACKAGE = "ModuleNotFoundError"
"""The last error of a process without the trainer's packages."""
REASON_CHARACTERS = 200


def ask_trainer(
    variables: Mapping[str, str],
    environment: Environment,
    request: PreviewRequest,
) -> PreviewReport | None:
    """Return what prepare would make of the data; `variables` are the stage's own.

    None without an answer, for example if the trainer's packages are not installed on this machine.
    """
    allowed, _ = environment_of(variables)
    process = run_module(
        MODULE,
        request.model_dump_json(by_alias=True),
        allowed | environment.variables(),
        LONGEST_SECONDS,
    )
    if process is None:
        return _unreadable(f"no answer within {LONGEST_SECONDS:g} s")
    with suppress(IndexError, ValidationError):
        # The last line: a library may print lines of its own before it.
        return PreviewReport.model_validate_json(process.stdout.splitlines()[-1])
    if MISSING_PACKAGE in process.stderr:
        return None
    # A preview that failed is no proof that the data is usable.
    lines = process.stderr.splitlines() or [f"exit code {process.returncode}"]
    return _unreadable(lines[-1][:REASON_CHARACTERS])


def _unreadable(reason: str) -> PreviewReport:
    message = f"the records cannot be read: {reason}"
    problem = PreviewProblem(field="datasets", message=message, exit_code=ExitCode.BUG)
    return PreviewReport(problems=(problem,))
