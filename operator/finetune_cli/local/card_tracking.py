"""`finetune card --track`: sends the card of a run to its run in MLflow and W&B, by a process of the trainer."""

import os
import sys
from pathlib import Path

from pydantic import ValidationError

from finetune_cli.checks.trainer_process import LONGEST_SECONDS, run_module
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_cli.output.metrics import TRAIN
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract.run_card import CardAnswer, CardRequest
from finetune_trainer.contract.tracking import Tracking

MODULE = "finetune_trainer.tracking"
FOLDER = "card"
"""Folder in the work folder of the run, in which W&B keeps its files."""


def trackers_of(pipeline: Pipeline) -> Tracking:
    """Return the settings of the trackers; raise UsageError if none takes a card, or the run has not finished."""
    tracking = pipeline.spec.tracking
    if tracking is None or not (tracking.mlflow or tracking.wandb):
        raise UsageError(
            f"{pipeline.key}: spec.tracking has neither mlflow nor wandb, which take a card; leave out --track"
        )
    train = pipeline.status.stages.get(TRAIN)
    # A stage that works reports to the same run of W&B, which takes one process at a time.
    if not pipeline.status.finished_at or train is None or not train.identity:
        raise UsageError(
            f"{pipeline.key} has not finished ({pipeline.status.phase}): use --track after its end"
        )
    return tracking.named(str(pipeline.key))


def track_card(tracking: Tracking, pipeline: Pipeline, workdir: Path, page: str) -> int:
    """Send the page of a finished run to its trackers, print where it is, and return the exit code."""
    request = CardRequest(
        tracking=tracking,
        identity=pipeline.status.stages[TRAIN].identity,
        folder=str(workdir / FOLDER),
        page=page,
        succeeded=pipeline.status.phase != "Failed",
    )
    answer = _send(request)
    for place in answer.places:
        # The standard output may hold the card.
        print(f"the card is in {place}", file=sys.stderr)
    for problem in answer.problems:
        print(f"finetune: the card was not sent: {problem}", file=sys.stderr)
    return FAILED if answer.problems else 0


def _send(request: CardRequest) -> CardAnswer:
    text = request.model_dump_json(by_alias=True)
    process = run_module(MODULE, text, os.environ, LONGEST_SECONDS)
    if process is None:
        return CardAnswer(problems=(f"no answer within {LONGEST_SECONDS:g} s",))
    try:
        # The last line: a library may print lines of its own before it.
        return CardAnswer.model_validate_json(process.stdout.splitlines()[-1])
    except (IndexError, ValidationError):
        lines = process.stderr.splitlines() or [f"exit code {process.returncode}"]
        return CardAnswer(problems=(lines[-1],))
