"""A reflector, after client-go's: lists one kind of object in pages, then watches from the list's version on.

It brings the cache up to date and passes each change on. It ends with its task only: every error is retried.
"""

import asyncio
import logging
import random  # noqa: TID251  an edge
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from finetune_operator.controller.metrics import WATCHES_RESTARTED
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache.change import Change
from finetune_operator.kubernetes.cache.store import NamespacedName, version_of
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.object import Object

# A silently dead connection hides changes for this long and a few seconds, and never for more than
# `client.SILENCE_SECONDS`.
WATCH_SECONDS = 20
"""Time after which a watch is opened again."""
MAX_WATCH_SECONDS = 300
"""The same with many namespaces, each of which has a watch of each kind."""
NAMESPACES_IN_TURN = 10
"""Namespaces up to which their watches are opened every `WATCH_SECONDS`."""
BASE_RETRY_SECONDS = 0.5
"""Delay after the first failure; it doubles with each failure in a row."""
MAX_RETRY_SECONDS = 10.0
"""Upper limit of that delay."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resource:
    """A kind of object in a scope, which is listed and watched."""

    kind: str
    """The plural, as in the path."""
    path: str
    query: tuple[tuple[str, str], ...] = ()
    """Selectors."""
    first: tuple[tuple[str, str], ...] = ()
    """Selectors of the objects that the first list reads, because they may still change; empty: all."""
    namespace: str | None = None
    """None: all namespaces."""
    seconds: int = WATCH_SECONDS
    """Time after which the watch is opened again."""
    later: bool = False
    """Whether the first list leaves the kind out: a reconcile reads an object that the cache lacks."""


def watch_seconds(namespaces: int) -> int:
    """Return after which time each watch is opened again, if there are watches of this many namespaces.

    Opening takes a request, and the operator sends no more of them than for `NAMESPACES_IN_TURN`.
    """
    seconds = WATCH_SECONDS * namespaces // NAMESPACES_IN_TURN
    return min(max(seconds, WATCH_SECONDS), MAX_WATCH_SECONDS)


class Cache(Protocol):
    """The cache that a reflector keeps up to date; see ResourceCache."""

    stores: dict[str, Any]

    def update(self, kind: str, received: Object, /) -> Change:
        """Store an object."""
        ...

    def remove(self, kind: str, deleted: Object, /) -> Change:
        """Remove a deleted object."""
        ...

    def sweep(
        self,
        kind: str,
        listed: set[NamespacedName],
        version: int,
        namespace: str | None,
    ) -> Iterator[Change]:
        """Remove the objects that a complete list of this version no longer has."""
        ...


class Reflector:
    """Keeps one kind of object in the cache up to date."""

    def __init__(
        self,
        api: KubernetesClient,
        cache: Cache,
        resource: Resource,
        on_change: Callable[[Change], None],
        on_listed: Callable[[Change], None],
    ) -> None:
        self.api = api
        self.cache = cache
        self.resource = resource
        self.on_change = on_change
        """Called with each change that a watch shows."""
        self.on_listed = on_listed
        """Called with each change that a list shows."""
        self.on_error: Callable[[Resource, Exception], None] = _ignore_error
        """Called with each error of a list or a watch."""
        self.version = ""
        """The resource version up to which the cache is complete; empty: a list is needed."""
        self.watch_from = ""
        """The version of the last list, complete or not: a watch from there shows all later changes."""
        self.listed = asyncio.Event()
        """Set when the cache has all objects up to this version."""
        self.answered_at: float | None = None
        """When the watch last delivered an event, or ended without an error, by the event loop's clock; None: no watch
        runs. A watch that has just begun counts as well."""

    async def watch(self) -> None:
        """Watch forever; list again if the version is too old."""
        self._note_answer()
        try:
            await self._watch_with_retry()
        finally:
            self.answered_at = None

    async def _watch_with_retry(self) -> None:
        delay = BASE_RETRY_SECONDS
        while True:
            try:
                if not self.version:
                    await self.list()
                await self._watch_once()
                delay = BASE_RETRY_SECONDS
            # Any error: one malformed object of one user must not stop the operator for all users.
            except Exception as error:
                if isinstance(error, ApiError) and error.status == HTTPStatus.GONE:
                    self.version = ""
                self.on_error(self.resource, error)
                bug = None if isinstance(error, ClusterError) else error
                log.warning(
                    "watching %s failed and is retried: %s",
                    self.resource.kind,
                    error,
                    exc_info=bug,
                )
                WATCHES_RESTARTED.labels(self.resource.kind).inc()
                await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311  jitter
                delay = min(delay * 2, MAX_RETRY_SECONDS)

    async def list(self) -> None:
        """Read the complete collection page by page, and pass on the differences. Raises ClusterError."""
        listed, version = await self._read(self.resource.query)
        if self.resource.kind in self.cache.stores:
            for change in self.cache.sweep(
                self.resource.kind, listed, int(version or 0), self.resource.namespace
            ):
                self.on_listed(change)
        self.version = version
        self.watch_from = version
        self.listed.set()

    async def list_first(self) -> None:
        """Read the objects of `Resource.first`. The rest is listed when the watch begins. Raises ClusterError."""
        self.version = ""
        self.listed.clear()
        if self.resource.later:
            return
        if not self.resource.first:
            await self.list()
            return
        query = (*self.resource.query, *self.resource.first)
        try:
            _, self.watch_from = await self._read(query)
        except ApiError as error:
            # A CRD from before this version cannot select by the field.
            if error.status != HTTPStatus.BAD_REQUEST:
                raise
            await self.list()

    async def _read(
        self, query: tuple[tuple[str, str], ...]
    ) -> tuple[set[NamespacedName], str]:
        """Bring the cache up to date with a list; return the names in the list, and its version."""
        listed: set[NamespacedName] = set()
        version = ""
        async for page in self.api.pages(self.resource.path, **dict(query)):
            version = str(page["metadata"].get("resourceVersion") or "")
            for item in page["items"]:
                self._apply("ADDED", item, self.on_listed)
                listed.add(_name_of(item))
            # Between two pages, the workers and the Lease get their turn.
            await asyncio.sleep(0)
        return listed, version

    async def _watch_once(self) -> None:
        seconds = round(self.resource.seconds * random.uniform(0.75, 1))  # noqa: S311  kinds are not watched anew all at once
        query = dict(self.resource.query)
        async for event in self.api.watch(
            self.resource.path, self.version, seconds, **query
        ):
            subject: Object = event["object"]
            # A bookmark has only a version: the watch can go on from it.
            if event["type"] != "BOOKMARK":
                self._apply(event["type"], subject, self.on_change)
            self.version = str(version_of(subject) or self.version)
            self._note_answer()
        self._note_answer()

    def _note_answer(self) -> None:
        self.answered_at = asyncio.get_running_loop().time()

    def _apply(
        self, kind_of_event: str, raw: Object, pass_on: Callable[[Change], None]
    ) -> None:
        try:
            if kind_of_event == "DELETED":
                change = self.cache.remove(self.resource.kind, raw)
            else:
                change = self.cache.update(self.resource.kind, raw)
            pass_on(change)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            # The pipeline of a malformed object is not reconciled; all others are.
            log.warning(
                "cannot read %s %s/%s",
                self.resource.kind,
                *_name_of(raw),
                exc_info=True,
            )


def _ignore_error(_resource: Resource, _error: Exception) -> None:
    """Do nothing."""


def _name_of(raw: Object) -> NamespacedName:
    """Return namespace and name of an object that may have none."""
    meta = raw.get("metadata") or {}
    return str(meta.get("namespace")), str(meta.get("name"))
