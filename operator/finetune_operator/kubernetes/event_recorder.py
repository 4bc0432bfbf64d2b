"""Kubernetes Events for users of kubectl, created in the background."""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.core.events import ATTEMPT_STARTED, Event
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists
from finetune_operator.kubernetes.translate.object import Object

COMPONENT = "finetune-operator"
# Without a limit they would fill the operator's memory.
MAX_WAITING = 200
"""Events of a namespace that wait to be created; more are dropped."""
MESSAGE_LENGTH = 1024
"""Bytes of the message of an Event that every version of its API takes."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Regarding:
    """The object that an Event is about, if it cannot be read as a pipeline."""

    key: Key
    uid: str
    resource_version: str


class EventRecorder:
    """Creates the Events of each namespace one after the other, so that no reconcile waits for them.

    A namespace whose admission webhooks are slow delays its own Events only. A failure is logged, not retried.
    """

    def __init__(self, api: KubernetesClient) -> None:
        self.api = api
        self.waiting: dict[str, deque[Object]] = {}
        """Namespace -> its Events that are to be created."""
        self._arrived = asyncio.Event()

    def record(self, about: Pipeline | Regarding, events: Sequence[Event]) -> None:
        """Log the events, and queue the events that a user would miss."""
        for event in events:
            # Of an ordinary stage, a line at its end is enough.
            is_start = event.ordinary and event.reason == ATTEMPT_STARTED
            level = logging.DEBUG if is_start else logging.INFO
            log.log(level, "%s: %s %s", about.key, event.reason, event.message)
            if event.ordinary:
                continue
            waiting = self.waiting.setdefault(about.key.namespace, deque())
            if len(waiting) < MAX_WAITING:
                waiting.append(_event_object(about, event))
                self._arrived.set()
            else:
                log.warning(
                    "%s: the Event %s is dropped: %d are waiting",
                    about.key,
                    event.reason,
                    MAX_WAITING,
                )

    async def run(self) -> None:
        """Create the queued Events, forever."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                tasks = {
                    namespace: task
                    for namespace, task in tasks.items()
                    if not task.done()
                }
                for namespace in self.waiting.keys() - tasks.keys():
                    tasks[namespace] = group.create_task(self._create_all(namespace))
                self._arrived.clear()
                await self._arrived.wait()

    async def _create_all(self, namespace: str) -> None:
        waiting = self.waiting[namespace]
        while waiting:
            await self._create(namespace, waiting[0])
            # Only now: if the creation was cancelled, the next leadership creates the Event.
            waiting.popleft()
        del self.waiting[namespace]

    async def _create(self, namespace: str, body: Object) -> None:
        try:
            await self.api.create(paths.events(namespace), body)
        except AlreadyExists:
            # An earlier request created it: the name is a hash of the content.
            pass
        except ClusterError as error:
            log.warning(
                "cannot create the Event %s/%s: %s",
                namespace,
                body["metadata"]["name"],
                error,
            )


def _event_object(about: Pipeline | Regarding, event: Event) -> Object:
    """Build a core/v1 Event named by a hash of its content, so that it is created once."""
    content = f"{about.uid} {about.resource_version} {event.reason} {event.message}"
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")  # noqa: TID251  an edge
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            # A name has at most 253 characters.
            "name": f"{about.key.name[:230]}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
            "namespace": about.key.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": about.key.name,
            "namespace": about.key.namespace,
            "uid": about.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": _message(event),
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }


def _message(event: Event) -> str:
    """Return the message, cut so that its link is whole."""
    text = event.message.encode()
    end = event.link
    if len(text) + len(end.encode()) > MESSAGE_LENGTH:
        end = f" …{end}"
    return text[: MESSAGE_LENGTH - len(end.encode())].decode(errors="ignore") + end
