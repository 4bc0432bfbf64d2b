"""Previews the data in a process of the trainer, which has the environment of the stage prepare."""

import subprocess
import sys
from collections.abc import Mapping

from pydantic import ValidationError

from finetune_cli.checks.store_access import environment_of
from finetune_trainer.contract import Environment, PrepareConfig
from finetune_trainer.contract.preview import (
    PreviewProblem,
    PreviewReport,
    PreviewRequest,
)
from finetune_trainer.exit_codes import ExitCode

# Not isolated (-I): the process must find the same packages as this process.
COMMAND = (sys.executable, "-P", "-m", "finetune_trainer.preview")
# Millions of records take minutes. Without a limit, a store that does not answer would hold the command for ever.
LONGEST_SECONDS = 3600.0
"""Longest time for a preview."""
MISSING_PACKAGE = "ModuleNotFoundError"
"""The last error of a process without the trainer's packages."""
REASON_CHARACTERS = 200


def ask_trainer(
    config: PrepareConfig,
    variables: Mapping[str, str],
    environment: Environment,
    examples: int = 0,
) -> PreviewReport | None:
    """Return what prepare would make of the data, with so many examples; `variables` are the stage's own.

    None without an answer, for example if the trainer's packages are not installed on this machine.
    """
    allowed, _ = environment_of(variables)
    request = PreviewRequest(config=config, examples=examples)
    process = subprocess.run(
        COMMAND,
        input=request.model_dump_json(by_alias=True),
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        env=allowed | environment.variables(),
        check=False,
    )
    try:
        # The last line: a library may print lines of its own before it.
        return PreviewReport.model_validate_json(process.stdout.splitlines()[-1])
    except (IndexError, ValidationError):
        pass
    if MISSING_PACKAGE in process.stderr:
        return None
    # A preview that failed is no proof that the data is usable.
    last = (process.stderr.splitlines() or [f"exit code {process.returncode}"])[-1]
    message = f"the records cannot be read: {last[:REASON_CHARACTERS]}"
    problem = PreviewProblem(field="datasets", message=message, exit_code=ExitCode.BUG)
    return PreviewReport(problems=(problem,))
