"""The watch of the pipelines, by kopf, and everything that keeps kopf within bounds (ADR 15).

kopf stays the controller of the custom resource, but it is made to own its process. Some responses of an API server (an
ERROR event, a minute of 503) end its operator, and some errors leave its watch hanging. It installs its own signal
handlers, and copies each object to find a difference that no handler needs. This module runs kopf as a watch among
others: it restarts kopf after an end or a hang, passes a signal on to the whole process, and switches the copies off.
"""

import asyncio
import logging
import os
import random  # noqa: TID251  an edge
import traceback
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import kopf
from kopf._cogs.clients import fetching
from typing_extensions import override

from finetune_operator.api.group import GROUP, PLURAL, VERSION
from finetune_operator.controller.metrics import WATCHES_RESTARTED
from finetune_operator.controller.reflector import BASE_RETRY_SECONDS, WATCH_SECONDS
from finetune_operator.controller.signals import ShutdownSignal
from finetune_operator.core.metadata import MANAGED_BY_VALUE
from finetune_operator.kubernetes.cache.cache import PIPELINES
from finetune_operator.kubernetes.client import PAGE, WATCH_GRACE_SECONDS
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.object import Object

KOPF_EXIT_SECONDS = 5.0
"""Time that kopf gets to end before it is started again."""
# The CRD may be installed again at any time, and pipelines then wait for this long.
MAX_PAUSE_SECONDS = 30.0
"""Upper limit of the time between two requests while the CRD is gone; it doubles from `BASE_RETRY_SECONDS` on."""
OnEvent = Callable[[str, Object], None]
"""Called with the type of a watch event, such as DELETED, and its object."""
VersionToWatch = Callable[[str | None], Awaitable[str]]
"""Called with a namespace, None for all, whenever kopf would list; returns the version from which kopf watches."""
log = logging.getLogger(__name__)


class KopfWatch:
    """Watches the pipelines with kopf, and starts kopf again whenever it ends or hangs."""

    def __init__(
        self,
        signals: ShutdownSignal,
        list_pipelines: Callable[[], Awaitable[None]],
        on_event: OnEvent,
        version_to_watch: VersionToWatch,
        seconds: int = WATCH_SECONDS,
    ) -> None:
        self.signals = signals
        self.list_pipelines = list_pipelines
        self.on_event = on_event
        self.version_to_watch = version_to_watch
        self.seconds = seconds
        """Time after which a watch is opened again."""
        self.lost_at: float | None = None
        """When the watch ended, if the pipelines could not be listed since, by the event loop's clock."""

    async def run(self, namespaces: Sequence[str | None], stop: asyncio.Event) -> None:
        """Watch these namespaces until `stop` is set; None stands for all namespaces."""
        has_ended = False
        self.lost_at = None
        pause = BASE_RETRY_SECONDS
        while not stop.is_set():
            try:
                if has_ended:
                    # Lists what has changed since kopf ended: a new watch begins with the present.
                    await self.list_pipelines()
                self.lost_at = None
                pause = BASE_RETRY_SECONDS
                await self._run_kopf(namespaces, stop)
            except Exception as error:  # noqa: BLE001  the watch is restarted after any error
                if has_ended and is_without_crd(error):
                    pause = min(2 * pause, MAX_PAUSE_SECONDS)
                    log.warning(
                        "the API server has no %s.%s; it is asked again in about %.0f s: install the CRD",
                        PLURAL,
                        GROUP,
                        pause,
                    )
                else:
                    log.warning(
                        "kopf ended and is restarted: %s",
                        str(error) or type(error).__name__,
                    )
            has_ended = True
            if self.lost_at is None:
                self.lost_at = asyncio.get_running_loop().time()
            WATCHES_RESTARTED.labels(PIPELINES).inc()
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311

    async def _run_kopf(
        self, namespaces: Sequence[str | None], stop: asyncio.Event
    ) -> None:
        """Run kopf until `stop` is set, or until it ends or hangs. Raises kopf's error."""
        hung = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(partial(_notice_hang, hung))
        clusterwide = None in namespaces
        scope: dict[str, Any] = {
            "clusterwide": clusterwide,
            "namespaces": [] if clusterwide else namespaces,
        }
        # An explicit identity: kopf's default contains the user's name, and a container's user has none.
        peering: dict[str, Any] = {"identity": MANAGED_BY_VALUE, "standalone": True}
        operator = kopf.operator(
            registry=self.registry(),
            settings=_settings(self.seconds),
            **scope,
            **peering,
        )
        tasks = [
            asyncio.create_task(wait) for wait in (operator, stop.wait(), hung.wait())
        ]
        kopf_task = tasks[0]
        try:
            with _without_lists(self.version_to_watch):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if kopf_task.done() and not kopf_task.exception():
                # kopf ends without an error when it receives a signal itself. The signal was for the whole process.
                self.signals.requested.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=KOPF_EXIT_SECONDS)
        if kopf_task.done() and not kopf_task.cancelled():
            error = kopf_task.exception()
            if error:
                raise error

    def registry(self) -> kopf.OperatorRegistry:
        """Return kopf's handlers: for the events of pipelines, for its start, and for its login."""
        registry = kopf.OperatorRegistry()

        @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
        async def on_event(event: Any, **_: Any) -> None:
            self.on_event(event["type"], dict(event["object"]))

        @kopf.on.startup(registry=registry)
        async def reinstall_signal_handlers(**_: Any) -> None:
            # kopf has just installed its own, which would end kopf only.
            self.signals.install()

        kopf.on.login(registry=registry)(kopf.login_via_client)
        return registry


@contextmanager
def _without_lists(version_to_watch: VersionToWatch) -> Iterator[None]:
    """Make kopf watch from the version of the operator's own list, in place of a list of its own.

    kopf would read all pipelines a second time, keep a record of each, and show no new pipeline before the list's end:
    with 20,000 finished pipelines that is a minute.
    """
    original = fetching.fetch_objs

    async def fetch_objs(
        *, resource: Any, namespace: Any, **others: Any
    ) -> AsyncIterator[tuple[Collection[Any], str]]:
        if resource.plural == PLURAL:
            yield (), await version_to_watch(namespace)
            return
        async for page in original(resource=resource, namespace=namespace, **others):
            yield page

    fetching.fetch_objs = fetch_objs
    try:
        yield
    finally:
        fetching.fetch_objs = original


def is_without_crd(error: Exception) -> bool:
    """Return whether a list failed because the API server does not have the resource."""
    return isinstance(error, ApiError) and error.status == HTTPStatus.NOT_FOUND


def silence_kopf_log() -> None:
    """Drop kopf's own log: `KopfWatch` logs each of its failures in a line."""
    logging.getLogger("kopf").setLevel(logging.CRITICAL)


def _notice_hang(
    hung: asyncio.Event, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Log an error that no task has raised, and set `hung` if it comes from kopf's code.

    kopf 1.45 leaves its watch without an end after such an error: a callback of it asserts that it runs in a task, and
    it does not.
    """
    loop.default_exception_handler(context)
    error = context.get("exception")
    frames = traceback.extract_tb(error.__traceback__) if error else []
    if any(f"{os.sep}kopf{os.sep}" in frame.filename for frame in frames):
        hung.set()


def _settings(seconds: int) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # The operator creates Events itself (`kubernetes.event_recorder`).
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    # An int: the API server rejects timeoutSeconds=20.0.
    settings.watching.server_timeout = seconds
    settings.watching.inactivity_timeout = seconds + WATCH_GRACE_SECONDS
    # As for all lists: a page of the largest pipelines has 55 MB.
    settings.watching.chunk_size = PAGE
    settings.persistence.diffbase_storage = NoDiff()
    return settings


class NoDiff(kopf.DiffBaseStorage):
    """Stores no state to compare an object with: kopf would copy each object, and no handler needs the difference."""

    @override
    def build(self, **_: Any) -> kopf.BodyEssence:
        return {}

    @override
    def fetch(self, **_: Any) -> None:
        return None

    @override
    def store(self, **_: Any) -> None:
        return None
