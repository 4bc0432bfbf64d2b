"""TensorBoard: event files in a folder of the workspace or of a claim."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from finetune_trainer.contract import Environment, TensorBoard
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.runtime.sources import locate
from finetune_trainer.tracking.port import ReportEnd, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """One folder for the run, and in it one event file for each stage.

    Each attempt writes the stage's file anew, makes TensorBoard forget the rows that it had read, and then removes the
    file of the attempt before. A kill may have torn the end of that file.
    """

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboardX"

    def __init__(
        self, settings: TensorBoard, run: TrackedRun, environment: Environment
    ) -> None:
        self._run = run
        self._folder = run.train_folder / "tensorboard"
        if settings.uri:
            self._folder = locate(settings.uri, environment) / run.identity
        self._writer: Any = None
        self._last_step = -1

    @override
    def log_rows(self, rows: Sequence[Row]) -> None:
        missing = [row for row in rows if row.step > self._last_step]
        if not missing:
            return
        # In a later stage, the rows are in the file of train.
        if self._run.stage == "train":
            events = []
            for row in missing:
                events += [
                    _scalar(name, value, row) for name, value in row.values.items()
                ]
            self._write(events, missing)
        self._last_step = missing[-1].step

    @override
    def log_scores(self, scores: Mapping[str, float]) -> None:
        now = time.time()  # noqa: TID251  an edge
        row = Row(max(0, self._last_step), now, {})
        events = [_scalar(name, value, row) for name, value in scores.items()]
        self._write(events)

    @override
    def register_model(self, uri: str, digest: str) -> None:
        self._write_text("model", f"{uri} {digest}")

    @override
    def log_card(self, card: str) -> None:
        self._write_text("model card", card)

    def _write_text(self, tag: str, content: str) -> None:
        from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboardX.summary import text  # noqa: PLC0415

        now = time.time()  # noqa: TID251  an edge
        summary = text(tag, content)
        event = Event(wall_time=now, step=max(0, self._last_step), summary=summary)
        self._write([event])

    @override
    def close(self, end: ReportEnd) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, events: Iterable[Any], purged: Sequence[Row] = ()) -> None:
        """Append events to the file. If it replaces a file, TensorBoard first forgets the purged rows of that file."""
        earlier: list[Path] = []
        if self._writer is None:
            pattern = f"events.out.tfevents.*.{self._run.stage}-*"
            earlier = list(self._folder.glob(pattern))
            self._open(purged if earlier else ())
        for event in events:
            self._writer.write_event(event)
        self._writer.flush()
        # Removed last, so that a kill at any moment leaves at least one file with the rows.
        for file in earlier:
            file.unlink(missing_ok=True)

    def _open(self, purged: Sequence[Row]) -> None:
        # Not SummaryWriter: its flush does not wait for the events that are still in its queue.
        from tensorboardX.event_file_writer import EventsWriter  # noqa: PLC0415  only this thread waits for it
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415

        self._folder.mkdir(parents=True, exist_ok=True)
        # A name has the second and the host: two attempts within a second would share it without the suffix.
        attempt = os.urandom(4).hex()
        prefix = str(self._folder / "events")
        self._writer = EventsWriter(prefix, f".{self._run.stage}-{attempt}")
        if purged:
            # TensorBoard takes these two events for a restart, and forgets all rows from the step on.
            step = purged[0].step
            restart = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=step, file_version="brain.Event:2"))
            self._writer.write_event(Event(step=step, session_log=restart))


def _scalar(name: str, value: float, row: Row) -> Any:
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415
    from tensorboardX.summary import scalar  # noqa: PLC0415

    return Event(wall_time=row.time, step=row.step, summary=scalar(name, value))
