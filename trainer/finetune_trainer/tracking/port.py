"""The port to an experiment tracker: the adapter of each tracker implements it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from finetune_trainer.contract.metric_rows import Row

MODEL_CARD = "model_card.md"
"""Name of the model card in a tracker."""
RUN_CARD = "run_card.html"
"""Name of the card of a run in a tracker."""


@dataclass(frozen=True)
class TrackedRun:
    """A run without its metrics, as a tracker describes it. All stages of a pipeline report to the same run."""

    identity: str
    """Identity of the train stage; identifies the run in every tracker."""
    name: str
    params: Mapping[str, str]
    """The recipe and its inputs, by dotted name; the same in every attempt."""
    stage: str
    """The stage that reports."""
    folder: Path
    """Folder of that stage."""
    train_folder: Path
    """Folder of the train stage."""


class ReportEnd(StrEnum):
    """The way in which the process that reports ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Tracker(Protocol):
    """One run in one experiment tracker.

    All calls are from one thread, and may take long or raise any exception. The constructor does neither. A process may
    be killed in the middle of a call: the next process makes it again, and the run then has everything once.
    """

    name: ClassVar[str]
    """Field of `contract.Tracking` and extra of the package."""
    package: ClassVar[str]
    """Module that must be installed."""

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log the rows that the run does not have yet. `rows` are all rows up to now, by ascending step."""

    def log_scores(self, scores: Mapping[str, float]) -> None:
        """Log numbers that belong to no step."""

    def register_model(self, uri: str, digest: str) -> None:
        """Record the published model: its URI, and sha256:… of its content."""

    def log_card(self, card: str) -> None:
        """Record the model card, in Markdown, in place of an earlier one."""

    def close(self, end: ReportEnd) -> None:
        """Make everything durable and end the process's part of the run."""


class PageTracker(Tracker, Protocol):
    """A tracker that shows a page of HTML."""

    def log_page(self, page: str) -> str:
        """Record the card of the run, in HTML, in place of an earlier card; return the place of the card."""
