"""The card of a run on this machine, and the file of any card."""

import contextlib
import json
import math
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune_cli.card.page import GENERATOR, page
from finetune_cli.card.record import RunRecord
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.published import published_model, run_environment
from finetune_cli.local.summary import relative_path, run_argument
from finetune_cli.output.metrics import TRAIN
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.local.cluster import Folders
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_trainer.contract import EvaluateResult, PushResult
from finetune_trainer.contract.environment import InvalidLocation
from finetune_trainer.contract.metric_rows import METRICS, read_rows
from finetune_trainer.contract.sample_rows import SAMPLES, read_samples
from finetune_trainer.sizes import format_size

BASE_RESULTS = "output/base-results.json"
"""File of evaluate with the base model's results, as lm-eval writes them."""
STDOUT = Path("-")
HEAD = 4096
"""Bytes of a file that show whether it is a card."""


def record_of_run(workdir: Path) -> RunRecord | None:
    """Return all that the card shows of a run; None if the folder holds no pipeline."""
    pipeline = PipelineFile(workdir).read()
    if pipeline is None:
        return None
    workspace = Folders.under(workdir, workdir).workspace(pipeline)
    training = workspace / TRAIN / _identity(pipeline, TRAIN)
    evaluation = workspace / "evaluate" / _identity(pipeline, "evaluate")
    now = None
    # Without a process that works on the run, nothing runs.
    if is_locked(workdir):
        now = datetime.now(UTC)  # noqa: TID251  an edge
    argument = run_argument(workdir)
    serve: tuple[str, ...] = ()
    # An adapter alone cannot be served.
    if published_model(pipeline):
        serve = (f"finetune run {argument} --keep-serving",)
    return RunRecord(
        pipeline,
        rows=read_rows(training / METRICS),
        samples=read_samples(training / SAMPLES),
        base_errors=_base_errors(pipeline, evaluation / BASE_RESULTS),
        folders=_folders(pipeline, workdir),
        serve_commands=serve,
        reproduce_command=f"finetune run {argument}",
        at=now,
        version=version("finetune-operator"),
    )


def write_card(record: RunRecord, output: Path | None) -> str:
    """Write the card to a file, NAME.html by default, and print its path and size; with `-` print the card.

    Return the card.
    """
    text = page(record)
    if output == STDOUT:
        sys.stdout.write(text)
        return text
    file = output or _default_file(record.name)
    content = text.encode()
    file.write_bytes(content)
    print(f"{file}: {format_size(len(content))}; open it in a browser")
    return text


def _default_file(name: str) -> Path:
    """Return NAME.html; raise UsageError if another program's file has this name."""
    file = Path(f"{Path(name).name}.html")
    if not file.exists():
        return file
    with file.open("rb") as existing:
        head = existing.read(HEAD)
    if GENERATOR.encode() not in head:
        raise UsageError(f"{file} exists and is no card: choose another file with -o")
    return file


def _identity(pipeline: Pipeline, stage: str) -> str:
    status = pipeline.status.stages.get(stage)
    if status is None or not status.identity:
        # A folder that does not exist, and not the folder of all results.
        return "none"
    return status.identity


def _folders(pipeline: Pipeline, workdir: Path) -> dict[str, str]:
    """Return URI -> folder of the base model and of each published model, as far as they are on this machine."""
    push = pipeline.status.result(PushResult)
    if push is None:
        return {}
    environment = run_environment(workdir, pipeline)
    folders = {}
    published = [target.uri for target in push.published]
    for uri in (pipeline.spec.model.uri, *published):
        # A store, or a claim that is no longer linked: the card then names the URI.
        with contextlib.suppress(InvalidLocation):
            folders[uri] = relative_path(environment.locate(uri))
    return folders


def _base_errors(pipeline: Pipeline, file: Path) -> dict[tuple[str, str], float]:
    """Return the standard errors of the base model's scores by task and metric, as far as lm-eval has written them."""
    evaluated = pipeline.status.result(EvaluateResult)
    if evaluated is None:
        return {}
    try:
        results = json.loads(file.read_bytes())["results"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    errors = {}
    for task, metrics in evaluated.scores.items():
        for metric in metrics:
            error = _error(results, task, metric)
            if error is not None:
                errors[task, metric] = error
    return errors


def _error(results: Any, task: str, metric: str) -> float | None:
    """Return lm-eval's standard error of a metric; None if it is unknown."""
    name, _, filter_name = metric.partition(",")
    try:
        numbers = results[task]
        for key, value in numbers.items():
            error_name, _, error_filter = key.partition(",")
            if error_name == f"{name}_stderr" and filter_name in {"", error_filter}:
                error = float(value)
                return error if math.isfinite(error) else None
    # lm-eval's placeholder for no error is a text.
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return None
