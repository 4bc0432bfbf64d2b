"""Which pipelines want to be looked at: each once, none twice at a time, none before its time."""

import asyncio
import random  # noqa: TID251  an edge
from collections import OrderedDict
from dataclasses import dataclass, field

from finetune_operator.core.pipeline import Key

BASE_DELAY = 0.5
"""Seconds until a pipeline that could not be reconciled is tried again; doubles each time."""
MAX_DELAY = 60.0


@dataclass
class _Due:
    at: float
    timer: asyncio.TimerHandle


@dataclass
class WorkQueue:
    """First come, first served: a pipeline that changes all the time waits behind the others as everybody does."""

    _queue: OrderedDict[Key, float] = field(default_factory=OrderedDict)
    """Waiting, with the time since when."""
    _processing: set[Key] = field(default_factory=set)
    _dirty: set[Key] = field(default_factory=set)
    """Busy, and something has happened meanwhile."""
    _delayed: dict[Key, _Due] = field(default_factory=dict)
    _failures: dict[Key, int] = field(default_factory=dict)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: Key) -> None:
        """Have a look as soon as someone is free."""
        self._cancel(key)
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queue:
            self._queue[key] = asyncio.get_running_loop().time()
            self._arrived.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Have a look after this time, or before: of several wishes the earliest counts."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, seconds)
        if key in self._queue or (key in self._delayed and self._delayed[key].at <= at):
            return
        self._cancel(key)
        self._delayed[key] = _Due(at, loop.call_at(at, self.add, key))

    def add_rate_limited(self, key: Key) -> float:
        """Have a look after a while that doubles with each failure in a row; give that while."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        wait = min(BASE_DELAY * 2.0 ** min(failures - 1, 16), MAX_DELAY)
        wait *= random.uniform(0.8, 1.2)  # noqa: S311  so that many that failed together do not come together
        self.add_after(key, wait)
        return wait

    def is_dirty(self, key: Key) -> bool:
        """Whether something has happened to it since it was given to somebody."""
        return key in self._dirty

    def forget(self, key: Key) -> None:
        """Forget its failures."""
        self._failures.pop(key, None)

    def remove(self, key: Key) -> None:
        """Forget everything: it is gone."""
        self._cancel(key)
        self._failures.pop(key, None)
        self._queue.pop(key, None)
        self._dirty.discard(key)

    async def get(self) -> Key:
        """Give the one that has waited longest, and keep it from everybody else until `done`."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        key, _ = self._queue.popitem(last=False)
        self._processing.add(key)
        return key

    def done(self, key: Key) -> None:
        """Let it be given again."""
        self._processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    @property
    def __len__(self) -> int:
        """How many are waiting for a free hand."""
        return len(self._queue)

    def oldest(self) -> float:
        """How long the first of them has waited, in seconds."""
        first = next(iter(self._queue.values()), None)
        return asyncio.get_running_loop().time() - first if first is not None else 0.0

    def _cancel(self, key: Key) -> None:
        if due := self._delayed.pop(key, None):
            due.timer.cancel()
