"""Failures as they happen: each error in full once, and with a count when it comes again."""

from collections import Counter
from collections.abc import Iterator

from finetune_operator.core.events import Event

ATTEMPT_FAILED, STAGE_FAILED, PIPELINE_FAILED = "AttemptFailed", "StageFailed", "PipelineFailed"
"""Reasons of events."""


class FailureLog:
    """Turns events into lines. Attempt, stage and pipeline fail with the same error, which is printed once.

    The error of an attempt is held back until it is known whether its stage fails, too. The status at the end of the
    command shows the error of a stage, so no line repeats it where `status_follows`.
    """

    def __init__(self, *, status_follows: bool) -> None:
        self.status_follows = status_follows
        self.held: Event | None = None
        self.times: Counter[str] = Counter()

    def lines(self, event: Event) -> Iterator[str]:
        """Yield the lines to print for an event and for those that were held back."""
        if event.reason == STAGE_FAILED and self.held:
            yield f"{ATTEMPT_FAILED}: {self.held.message.partition(': ')[0]}"
            self.held = None
        yield from self.flush()
        if event.reason == ATTEMPT_FAILED:
            self.held = event
        elif event.reason == STAGE_FAILED and not self.status_follows:
            yield f"{STAGE_FAILED}: {event.message}"
        elif event.reason in {STAGE_FAILED, PIPELINE_FAILED}:
            yield f"{event.reason}: {event.message.partition(': ')[0]}"
        else:
            yield f"{event.reason}: {event.message}"

    def flush(self) -> Iterator[str]:
        """Yield the line that was held back: no other event explains it."""
        if self.held is None:
            return
        subject, _, error = self.held.message.partition(": ")
        self.held = None
        self.times[error] += 1
        count = self.times[error]
        yield f"{ATTEMPT_FAILED}: {subject}: " + (
            error if count == 1 else f"the same error, {count} times now"
        )
