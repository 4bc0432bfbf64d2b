"""Failures as they happen: each error in full once, and with a count when it comes again."""

from collections import Counter
from collections.abc import Iterator

from finetune_operator.core.events import Event

# Reasons of events.
ATTEMPT_FAILED = "AttemptFailed"
STAGE_FAILED = "StageFailed"
PIPELINE_FAILED = "PipelineFailed"


class FailureLog:
    """Turns events into lines. Attempt, stage and pipeline fail with the same error, which is printed once.

    The error of an attempt is held back until it is known whether its stage fails, too. The status at the end of the
    command shows the error of a stage, so no line repeats it if `status_follows`.
    """

    def __init__(self, *, status_follows: bool) -> None:
        self.status_follows = status_follows
        self.held: Event | None = None
        self.times: Counter[str] = Counter()

    def lines(self, event: Event) -> Iterator[str]:
        """Yield the lines to print for an event and for the events that were held back."""
        if event.reason == STAGE_FAILED and self.held:
            # The stage fails with the attempt's error, so the attempt's line is without it.
            yield f"{ATTEMPT_FAILED}: {_subject(self.held)}"
            self.held = None
        yield from self.flush()
        if event.reason == ATTEMPT_FAILED:
            self.held = event
            return
        error_is_shown = event.reason == PIPELINE_FAILED or (
            event.reason == STAGE_FAILED and self.status_follows
        )
        text = event.message
        if error_is_shown:
            text = _subject(event)
        yield f"{event.reason}: {text}"

    def flush(self) -> Iterator[str]:
        """Yield the line that was held back: no other event explains it."""
        if self.held is None:
            return
        subject, _, error = self.held.message.partition(": ")
        self.held = None
        self.times[error] += 1
        count = self.times[error]
        if count > 1:
            error = f"the same error, {count} times now"
        yield f"{ATTEMPT_FAILED}: {subject}: {error}"


def _subject(event: Event) -> str:
    """Return what has failed, without the error."""
    return event.message.partition(": ")[0]
