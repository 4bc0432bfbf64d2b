"""Finds gates with standardErrors on scores that have no standard error: such a gate is never measured."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune_cli.checks.task_file import aggregation_of
from finetune_cli.manifest.fields import GateMetric, Location

BOOTSTRAPPED = frozenset(
    {
        *("nanmean", "median", "perplexity", "f1", "matthews_corrcoef"),
        *("bleu", "chrf", "chrf++", "ter"),
    }
)
"""Aggregations of which lm-eval estimates the standard error by resampling."""
WITHOUT_ERROR = frozenset(
    {"weighted_perplexity", "bits_per_byte", "brier_score", "bypass"}
)
"""Aggregations without a standard error."""


def errors_by_file(
    gates: Iterator[GateMetric], files: Mapping[str, Path]
) -> Iterator[tuple[Location, str]]:
    """Yield location and message for each gate whose task's file shows that its score has no standard error."""
    for gate in gates:
        file = files.get(gate.task)
        if file is None or not gate.needs_error:
            continue
        metric, _, _ = gate.metric.partition(",")
        aggregation = aggregation_of(file, metric)
        is_without = aggregation in WITHOUT_ERROR
        # A difference is paired question by question, which needs a score that is a plain mean.
        if gate.against_base:
            is_without |= aggregation in BOOTSTRAPPED
        if is_without:
            yield gate.errors_location, _message(gate)


def errors_by_answer(
    gates: Iterator[GateMetric], answers: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Location, str]]:
    """Yield location and message as `errors_by_file`, from what the trainer knows of the tasks that it has loaded."""
    for gate in gates:
        answer = answers.get(gate.task, {})
        without_error = answer.get("without_error") or {}
        compared = "Base" if gate.against_base else "Value"
        metric, _, _ = gate.metric.partition(",")
        if gate.needs_error and metric in without_error.get(compared, ()):
            yield gate.errors_location, _message(gate)


def _message(gate: GateMetric) -> str:
    score = f"the difference in {gate.metric}" if gate.against_base else gate.metric
    return f"{score} has no standard error, so that the gate is never measured; set standardErrors to 0"
