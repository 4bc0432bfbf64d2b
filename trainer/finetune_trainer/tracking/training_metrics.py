"""The metrics of the training loop: recorded in the file at once, sent to the trackers when they are durable."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from finetune_trainer.contract import LossCurve
from finetune_trainer.contract.metric_rows import METRICS
from finetune_trainer.contract.sample_rows import SAMPLES, SampleRow
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.tracking.loss_curve import LossCurveBuilder
from finetune_trainer.tracking.metrics_file import MetricsFile
from finetune_trainer.tracking.samples_file import SamplesFile
from finetune_trainer.tracking.trackers import Trackers

# All rows are held in memory, about 1 KB each.
MAX_ROWS = 10_000
"""Steps that are logged; of a longer training only every n-th step is."""


class TrainingMetrics:
    """Records metrics of steps. A tracker gets a row when training can no longer repeat its step.

    Use it as a context manager: leaving the block sends the remaining rows, within the time limit of `Trackers`.
    """

    def __init__(
        self, folder: Path, trackers: Trackers, steps: int, fence: Fence = UNFENCED
    ) -> None:
        self._file = MetricsFile(folder / METRICS, fence)
        self._trackers = trackers
        self._samples = SamplesFile(folder / SAMPLES, fence)
        self._every = math.ceil(steps / MAX_ROWS)
        self._curve = LossCurveBuilder(steps)
        self._sent_before = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._trackers.log_all_rows(self._file.rows())
        # The trackers last: they may take seconds, after which a kill is more likely.
        self._file.close()
        self._samples.close()
        self._trackers.__exit__(kind)

    def resume(self, step: int, *, samples: bool = False) -> None:
        """Remove rows after the step that training resumes from, durably, before any of them is recorded again.

        Without `samples`, none are recorded and their file stays as it is.
        """
        self._file.open(step)
        self._curve.restart(self._file.rows())
        if samples:
            self._samples.open(step)

    def record_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a finished step, if the step is logged."""
        if step % self._every == 0:
            self.record(step, values)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Record more values of a step."""
        self._file.record(step, values)
        self._curve.add(step, values)

    def record_samples(self, rows: Iterable[SampleRow]) -> None:
        """Record texts that were generated at a step, unless they are known from before an interruption."""
        self._samples.record(rows)

    def loss_curve(self) -> LossCurve | None:
        """Return the loss of all recorded steps, in few points."""
        return self._curve.curve()

    def sync(self) -> None:
        """Make all rows durable. The checkpoint's thread calls this, while training may record more rows."""
        self._file.sync()
        self._samples.sync()

    def send(self, saved_step: int | None) -> None:
        """Send the rows before the newest durable step, if there is a newer one; return at once.

        The row of that step itself may get a validation loss yet.
        """
        if saved_step is None or saved_step <= self._sent_before:
            return
        self._sent_before = saved_step
        # The disk had room for a checkpoint, so it may have room for a file that failed before.
        self._file.try_again()
        self._samples.try_again()
        self._trackers.log_rows(self._file.rows(before=saved_step))
