"""Events for the pipelines that wait because the operator may not read what it needs.

It happens after an upgrade, if the platform team writes the operator's roles itself. Without an Event, a user would
see a pipeline that does not go on, without a reason.
"""

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus

from finetune_operator.core.events import Event, forbidden_event
from finetune_operator.kubernetes.cache.cache import ResourceCache
from finetune_operator.kubernetes.event_recorder import Regarding
from finetune_operator.kubernetes.translate.api_errors import ApiError

# Kubernetes deletes Events after an hour.
REPEAT_SECONDS = 3000.0
"""Time after which a pipeline that still waits gets the Event again."""
Record = Callable[[Regarding, Sequence[Event]], None]
"""`EventRecorder.record`."""


class MissingRights:
    """Reports a missing right to each pipeline that waits for it."""

    def __init__(self, cache: ResourceCache, record: Record) -> None:
        self.cache = cache
        self.record = record
        self._reported: dict[tuple[str, str], float] = {}
        """Pipeline's uid and kind that cannot be read -> when it was reported, by the event loop's clock."""

    def report(self, kind: str, namespace: str | None, error: Exception) -> None:
        """Create an Event for each unfinished pipeline of the namespace; None: of all. Ignore other errors."""
        if not isinstance(error, ApiError) or error.status != HTTPStatus.FORBIDDEN:
            return
        now = asyncio.get_running_loop().time()
        # Else deleted pipelines would stay in it.
        self._reported = {
            subject: at
            for subject, at in self._reported.items()
            if now - at < REPEAT_SECONDS
        }
        event = forbidden_event(f"the operator may not read {kind}: {error}")
        for entry in self.cache.pipelines.entries.values():
            pipeline = entry.value
            is_elsewhere = namespace and pipeline.key.namespace != namespace
            subject = (pipeline.uid, kind)
            if pipeline.finished or is_elsewhere or subject in self._reported:
                continue
            self._reported[subject] = now
            about = Regarding(pipeline.key, pipeline.uid, f"{now:.0f}")
            self.record(about, [event])
