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
from finetune_operator.kubernetes.cache import Change
from finetune_operator.kubernetes.client import KubernetesClient, Object
from finetune_operator.kubernetes.store import NamespacedName, version_of
from finetune_operator.kubernetes.translate.api_errors import ApiError

WATCH_SECONDS = 20
"""After which a watch is opened again. A silently dead connection hides changes for this long and a few seconds."""
BASE_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 10.0
"""Delay after a failure; it doubles up to the maximum."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resource:
    """A kind of object in a scope: what is listed and watched."""

    kind: str
    """The plural, as in the path."""
    path: str
    query: tuple[tuple[str, str], ...] = ()
    """Selectors."""
    first: tuple[tuple[str, str], ...] = ()
    """Selectors of the objects that the first list reads, because they may still change; empty: all."""
    namespace: str | None = None
    """None: all namespaces."""


class Cache(Protocol):
    """What a reflector keeps up to date; see ResourceCache."""

    stores: dict[str, Any]

    def update(self, kind: str, found: Object) -> Change:
        """Store an object."""
        ...

    def remove(self, kind: str, found: Object) -> Change:
        """Remove a deleted object."""
        ...

    def sweep(
        self, kind: str, listed: set[NamespacedName], version: int, namespace: str | None
    ) -> Iterator[Change]:
        """Remove what a complete list of this version no longer has."""
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
        self.api, self.cache, self.resource = api, cache, resource
        self.on_change, self.on_listed = on_change, on_listed
        """Called with each change that a watch shows, and with each that a list shows."""
        self.version = ""
        """The resource version up to which the cache is complete; empty: a list is needed."""
        self.listed = asyncio.Event()
        """Set when the cache has all objects up to this version."""
        self.answered_at: float | None = None
        """When the watch last delivered an event, or ended without an error, by the event loop's clock; None: no watch
        runs. A watch that has just begun counts as well."""

    async def watch(self) -> None:
        """Watch forever; list again where the version is too old."""
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
            except (
                Exception
            ) as error:  # one malformed object of one user must not stop the operator for all users
                if isinstance(error, ApiError) and error.status == HTTPStatus.GONE:
                    self.version = ""
                bug = None if isinstance(error, ClusterError) else error
                log.warning(
                    "watching %s failed and is retried: %s", self.resource.kind, error, exc_info=bug
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
        self.listed.set()

    async def list_first(self) -> None:
        """Read what `Resource.first` selects. The watch lists the rest when it begins. Raises ClusterError."""
        self.version = ""
        self.listed.clear()
        if self.resource.first:
            await self._read((*self.resource.query, *self.resource.first))
        else:
            await self.list()

    async def _read(self, query: tuple[tuple[str, str], ...]) -> tuple[set[NamespacedName], str]:
        """Bring the cache up to date with a list; return what it had, and its version."""
        listed: set[NamespacedName] = set()
        version = ""
        async for page in self.api.pages(self.resource.path, **dict(query)):
            version = str(page["metadata"].get("resourceVersion") or "")
            for found in page["items"]:
                self._apply("ADDED", found, self.on_listed)
                listed.add(_name_of(found))
            await asyncio.sleep(0)  # between two pages, the workers and the Lease get their turn
        return listed, version

    async def _watch_once(self) -> None:
        seconds = round(WATCH_SECONDS * random.uniform(0.75, 1))  # noqa: S311  kinds are not watched anew all at once
        query = dict(self.resource.query)
        async for event in self.api.watch(self.resource.path, self.version, seconds, **query):
            found: Object = event["object"]
            if event["type"] != "BOOKMARK":
                self._apply(event["type"], found, self.on_change)
            self.version = str(version_of(found) or self.version)
            self._note_answer()
        self._note_answer()

    def _note_answer(self) -> None:
        self.answered_at = asyncio.get_running_loop().time()

    def _apply(self, kind_of_event: str, found: Object, pass_on: Callable[[Change], None]) -> None:
        change = self.cache.remove if kind_of_event == "DELETED" else self.cache.update
        try:
            pass_on(change(self.resource.kind, found))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            # The pipeline of a malformed object is not reconciled; all others are.
            log.warning("cannot read %s %s/%s", self.resource.kind, *_name_of(found), exc_info=True)


def _name_of(found: Object) -> NamespacedName:
    """Return namespace and name of an object that may have none."""
    meta = found.get("metadata") or {}
    return str(meta.get("namespace")), str(meta.get("name"))
