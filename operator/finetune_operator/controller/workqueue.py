"""The work queue: which pipelines to reconcile next, after client-go's rate-limited work queue.

A pipeline is in the queue at most once, is processed by at most one worker at a time, and not before its delay is over.
"""

import asyncio
import random  # noqa: TID251  an edge
from collections import OrderedDict
from dataclasses import dataclass, field

from finetune_operator.core.pipeline import Key

BASE_DELAY = 0.5
"""Seconds until a pipeline that could not be reconciled is retried; doubles with each failure in a row."""
MAX_DELAY = 60.0
"""Upper limit of that delay in seconds, before jitter."""


@dataclass
class _Delayed:
    at: float
    """By the event loop's clock."""
    timer: asyncio.TimerHandle


@dataclass
class WorkQueue:
    """A first-in, first-out queue: a pipeline that changes all the time waits behind the others after each turn."""

    _queue: OrderedDict[Key, float] = field(default_factory=OrderedDict)
    """Pipelines that wait for a worker, with the time at which each was added, by the event loop's clock."""
    _processing: set[Key] = field(default_factory=set)
    """Pipelines that a worker has, from `get` to `done`."""
    _dirty: set[Key] = field(default_factory=set)
    """Pipelines that were added again while a worker has them."""
    _delayed: dict[Key, _Delayed] = field(default_factory=dict)
    """Pipelines that are added later."""
    _failures: dict[Key, int] = field(default_factory=dict)
    """Failures in a row."""
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: Key) -> None:
        """Add a pipeline; while a worker has it, mark it dirty, so that `done` adds it."""
        self._cancel_delay(key)
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queue:
            self._queue[key] = asyncio.get_running_loop().time()
            self._arrived.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Add a pipeline after a delay; of several delays, the one that ends first counts."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, seconds)
        if key in self._queue or (key in self._delayed and self._delayed[key].at <= at):
            return
        self._cancel_delay(key)
        self._delayed[key] = _Delayed(at, loop.call_at(at, self.add, key))

    def add_rate_limited(self, key: Key) -> float:
        """Add a pipeline after a delay that doubles with each failure in a row; return the delay in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(BASE_DELAY * 2.0 ** min(failures - 1, 16), MAX_DELAY)
        delay *= random.uniform(0.8, 1.2)  # noqa: S311  jitter: pipelines that failed together are retried apart
        self.add_after(key, delay)
        return delay

    def is_dirty(self, key: Key) -> bool:
        """Return whether the pipeline was added again since a worker got it."""
        return key in self._dirty

    def forget(self, key: Key) -> None:
        """Reset the pipeline's count of failures."""
        self._failures.pop(key, None)

    def remove(self, key: Key) -> None:
        """Remove a pipeline that no longer exists, with its delay and its count of failures."""
        self._cancel_delay(key)
        self._failures.pop(key, None)
        self._queue.pop(key, None)
        self._dirty.discard(key)

    async def get(self) -> Key:
        """Wait for a pipeline and return the one that has waited longest; no other worker gets it until `done`."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        key, _ = self._queue.popitem(last=False)
        self._processing.add(key)
        return key

    def done(self, key: Key) -> None:
        """Mark a pipeline as processed; add it again if it is dirty."""
        self._processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    def __len__(self) -> int:
        """Return how many pipelines wait for a worker."""
        return len(self._queue)

    def oldest(self) -> float:
        """Return how long the first pipeline in the queue has waited, in seconds; 0 if the queue is empty."""
        first = next(iter(self._queue.values()), None)
        return asyncio.get_running_loop().time() - first if first is not None else 0.0

    def _cancel_delay(self, key: Key) -> None:
        if delayed := self._delayed.pop(key, None):
            delayed.timer.cancel()
