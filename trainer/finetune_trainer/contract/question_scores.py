"""The values of single questions that evaluate stores, and the paired difference of two models.

The trainer writes the files and compares with the base model; the command line reads them and compares runs.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.contract.tasks import HELD_OUT

HELD_OUT_FILE = "held-out.jsonl"
"""File in the output of evaluate with what was measured of each held-out row or pair."""
WEIGHT = "weight"
"""Key of a row's number of targets in this file."""
HELD_OUT_SCORES = {"loss": "validation_loss", "rewards/accuracies": "reward_accuracy"}
"""Means of an objective, which are keys in this file -> the names of the scores."""
SAMPLES = "samples-{}.jsonl"
"""File in the output of evaluate with lm-eval's record of each question of a task."""
DIGITS = 6
"""Significant digits of a score: the scores of sixteen tasks then fit into a termination message."""

MetricFilter = tuple[str, str]
"""lm-eval's names of a metric, and of the filter of the model's answers."""
ByQuestion = dict[MetricFilter, dict[int, float]]
"""Values by metric and filter, then by the index of the question."""


@dataclass(frozen=True)
class PairedDifference:
    """The mean over questions of the difference between two models."""

    mean: float
    stderr: float | None
    """Standard error; None for a single question."""
    questions: int
    """Number of questions."""


@dataclass(frozen=True)
class QuestionScores:
    """The values of one score, question by question."""

    questions: str
    """Digest of the questions. Two models are paired only on equal questions."""
    values: tuple[float, ...]
    weights: tuple[float, ...]
    """Targets of each question; 1 for a question of lm-eval. A value is the sum over them."""

    @property
    def mean(self) -> float:
        """The score as evaluate reports it."""
        return significant(mean_of(self.values, self.weights))

    def minus(self, other: "QuestionScores") -> PairedDifference | None:
        """Return the paired difference from another model; None if the questions are others."""
        if self.questions != other.questions or self.weights != other.weights:
            return None
        return paired_difference(self.values, other.values, self.weights)


Scores = dict[str, dict[str, QuestionScores]]
"""Values by task and score."""


def paired_difference(
    values: Sequence[float], base: Sequence[float], weights: Sequence[float]
) -> PairedDifference:
    """Return the difference value - base of the means over the same questions in the same order."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    return PairedDifference(
        mean_of(differences, weights),
        stderr_of(differences, weights),
        len(differences),
    )


def mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of sums over targets, whose numbers are the weights."""
    return sum(values) / sum(weights)


def stderr_of(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the standard error of this mean; None for a single question, and if a value is not finite.

    It is the error of a ratio estimator (Cochran 1977, Sampling Techniques, section 6.4): rows differ in their numbers
    of targets. With equal weights it is the standard error of a mean.
    """
    count = len(values)
    if count == 1:
        return None
    mean = mean_of(values, weights)
    squares = 0.0
    for value, weight in zip(values, weights, strict=True):
        residual = value - mean * weight
        # Not a power, which raises OverflowError for large numbers.
        squares += residual * residual
    stderr = math.sqrt(count / (count - 1) * squares) / sum(weights)
    return stderr if math.isfinite(stderr) else None


def significant(number: float) -> float:
    """Return a number with DIGITS significant digits."""
    return float(f"{number:.{DIGITS}g}")


def values_by_question(
    samples: Iterable[Mapping[str, Any]], is_mean: Callable[[str], bool]
) -> ByQuestion:
    """Return the values of the metrics that are means over questions, from lm-eval's record of each question."""
    values: ByQuestion = {}
    for sample in samples:
        for metric in sample["metrics"]:
            if is_mean(metric):
                by_question = values.setdefault((metric, sample["filter"]), {})
                by_question[sample["doc_id"]] = float(sample[metric])
    return values


def score_names(keys: Iterable[MetricFilter]) -> dict[MetricFilter, str]:
    """Return the names of scores: the metric, with the filter only if the metric has several."""
    filters: dict[str, list[str]] = {}
    for metric, name in keys:
        filters.setdefault(metric, []).append(name)
    return {
        (metric, name): metric if len(names) == 1 else f"{metric},{name}"
        for metric, names in filters.items()
        for name in names
    }


def read_question_scores(output: Path, rows: str) -> Scores:
    """Return the values of single questions in the output of evaluate; none if it is gone or damaged.

    `rows` is the digest of the rows of prepare, some of which are held out.
    """
    scores: Scores = {}
    prefix, suffix = SAMPLES.split("{}")
    try:
        for path in sorted(output.glob(SAMPLES.format("*"))):
            task = path.name.removeprefix(prefix).removesuffix(suffix)
            scores[task] = _of_task(list(_records(path)))
        held_out = list(_records(output / HELD_OUT_FILE))
        if held_out:
            scores[HELD_OUT] = _of_held_out(held_out, rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return scores


def to_json(scores: Scores) -> dict[str, Any]:
    """Return the values as JSON, for `from_json`."""
    return {
        task: {name: asdict(values) for name, values in by_name.items()}
        for task, by_name in scores.items()
    }


def from_json(content: Mapping[str, Any]) -> Scores:
    """Return the values that `to_json` has written. Raise KeyError, TypeError or ValueError for other JSON."""
    return {
        task: {
            name: QuestionScores(
                str(stored["questions"]),
                tuple(map(float, stored["values"])),
                tuple(map(float, stored["weights"])),
            )
            for name, stored in by_name.items()
        }
        for task, by_name in content.items()
    }


def _of_task(samples: list[Mapping[str, Any]]) -> dict[str, QuestionScores]:
    """Return the values of a task's scores. Those that are no mean do not have the mean that evaluate reports."""
    numbers = _numeric_metrics(samples)
    values = values_by_question(samples, numbers.__contains__)
    names = score_names(values)
    questions = {
        sample["doc_id"]: (sample["doc_hash"], sample["target_hash"])
        for sample in samples
    }
    scores = {}
    for key, by_question in values.items():
        indexes = sorted(by_question)
        scores[names[key]] = QuestionScores(
            _digest([questions[index] for index in indexes]),
            tuple(by_question[index] for index in indexes),
            (1.0,) * len(indexes),
        )
    return scores


def _numeric_metrics(samples: list[Mapping[str, Any]]) -> frozenset[str]:
    """Return the metrics with a number for each question; others, such as F1, have what a whole is made from."""
    others = {
        metric
        for sample in samples
        for metric in sample["metrics"]
        if not isinstance(sample[metric], int | float)
    }
    named = {metric for sample in samples for metric in sample["metrics"]}
    return frozenset(named - others)


def _of_held_out(
    rows: list[Mapping[str, Any]], digest: str
) -> dict[str, QuestionScores]:
    weights = tuple(float(row[WEIGHT]) for row in rows)
    return {
        name: QuestionScores(digest, tuple(float(row[key]) for row in rows), weights)
        for key, name in HELD_OUT_SCORES.items()
        if key in rows[0]
    }


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.is_file():
        for line in path.read_text("utf-8").splitlines():
            yield json.loads(line)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
