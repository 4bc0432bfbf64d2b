"""The best of several runs by a metric that the user names."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune_cli.comparison.compare import (
    Measurements,
    Run,
    measurements,
    metric_names,
    score_difference,
)
from finetune_cli.diagnostics import UsageError, closest_match

HIGHER_IS_BETTER = frozenset(
    {"acc", "acc_norm", "exact_match", "f1", "reward_accuracy", "bleu", "chrf", "mcc"}
)
LOWER_IS_BETTER = frozenset(
    {
        *("loss", "validation_loss", "time", "cost"),
        *("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"),
    }
)
"""Metrics whose direction is known."""
DIRECTIONS = {"max": True, "min": False}
"""Prefix of a metric, as in max:rouge -> whether higher is better."""
CLEAR_ERRORS = 2
"""Standard errors by which a paired difference is clear: 95 % confidence."""
OWN: dict[str, Callable[[Measurements], float | None]] = {
    "loss": lambda measured: measured.training_loss,
    "validation_loss": lambda measured: measured.validation_loss,
    "time": lambda measured: measured.seconds or None,
    "cost": lambda measured: None if measured.cost is None else float(measured.cost),
}
"""Metrics that are no scores of a task."""


@dataclass(frozen=True)
class Metric:
    """A number of each run, and its direction."""

    name: str
    task: str
    """Empty for the metrics in OWN."""
    metric: str
    higher_is_better: bool

    def value(self, run: Run) -> float | None:
        """Return the number of a run; None if it is not known or not finite."""
        measured = measurements(run)
        if self.task:
            scores = measured.scores.get(self.task, {})
            score = scores.get(self.metric)
            value = score.value if score else None
        else:
            value = OWN[self.metric](measured)
        if value is None or not math.isfinite(value):
            return None
        return value


@dataclass(frozen=True)
class Ranking:
    """The runs from the best to the worst; those without the metric are last, in the given order."""

    metric: Metric
    runs: tuple[Run, ...]

    @property
    def best(self) -> Run:
        """The best run."""
        return self.runs[0]

    @property
    def value(self) -> float | None:
        """The best run's number."""
        return self.metric.value(self.best)

    @property
    def equals(self) -> str:
        """The name of the next run if it is not clearly worse; empty if it is, or if the difference has no error."""
        if not self.metric.task or len(self.runs) == 1:
            return ""
        second = self.runs[1]
        task = self.metric.task
        gap = score_difference(self.best, second, task, self.metric.metric)
        if gap is None or gap.stderr is None:
            return ""
        is_wide = abs(gap.value) >= CLEAR_ERRORS * gap.stderr
        # Equal scores may have an error of zero, and none of them is better.
        if is_wide and gap.value != 0:
            return ""
        return second.name


def rank(runs: Sequence[Run], text: str) -> Ranking:
    """Return the runs ranked by a metric such as acc, docstrings/acc, loss or min:perplexity.

    Raise UsageError if the metric is not known, or of no run, or if its direction is not known.
    """
    metric = _metric(runs, text)
    known: list[tuple[float, Run]] = []
    unknown: list[Run] = []
    for run in runs:
        value = metric.value(run)
        if value is None:
            unknown.append(run)
        else:
            known.append((value, run))
    if not known:
        raise UsageError(f"--best {text}: no run has a {metric.name} yet")
    # By the value alone, in a stable sort: of equal runs, the first that was named is the best.
    known.sort(key=lambda pair: pair[0], reverse=metric.higher_is_better)
    ranked = [run for _, run in known]
    return Ranking(metric, (*ranked, *unknown))


def _metric(runs: Sequence[Run], text: str) -> Metric:
    prefix, colon, rest = text.partition(":")
    direction = DIRECTIONS.get(prefix) if colon else None
    name = text if direction is None else rest
    task, metric = _task_and_metric(runs, name, text)
    if direction is None:
        direction = _direction(runs, task, metric)
    if direction is None:
        raise UsageError(
            f"--best {text}: it is not known whether a higher {name} is better; "
            f"write max:{name} or min:{name}"
        )
    return Metric(name, task, metric, direction)


def _task_and_metric(runs: Sequence[Run], name: str, text: str) -> tuple[str, str]:
    if name in OWN:
        return "", name
    scores = metric_names(runs)
    matches = []
    for task, metric in scores:
        if name in (metric, f"{task}/{metric}"):
            matches.append((task, metric))
    if len(matches) == 1:
        return matches[0]
    full_names = [f"{task}/{metric}" for task, metric in matches or scores]
    if matches:
        raise UsageError(
            f"--best {text}: several tasks have it; name one: {', '.join(full_names)}"
        )
    known = [*OWN, *full_names]
    short = [metric for _, metric in scores]
    match = closest_match(name, [*known, *short])
    hint = f"did you mean {match}? " if match else ""
    raise UsageError(
        f"--best {text}: no run has this metric; {hint}known are {', '.join(known)}"
    )


def _direction(runs: Sequence[Run], task: str, metric: str) -> bool | None:
    """Return whether higher is better: by the metric's name, else by a gate's operator; None if it is not known."""
    # lm-eval writes the filter of the answers behind a comma: exact_match,strict-match.
    plain_name = metric.partition(",")[0]
    if plain_name in HIGHER_IS_BETTER:
        return True
    if plain_name in LOWER_IS_BETTER:
        return False
    for run in runs:
        for gate in run.status.gates:
            gate_metric = gate.metric.partition(",")[0]
            if gate.task == task and gate_metric == plain_name:
                return gate.operator.startswith("GreaterThan")
    return None
