"""The work queue: which pipelines to reconcile next, after client-go's rate-limited work queue.

A pipeline is in the queue at most once, is processed by at most one worker at a time, and not before its delay is over.
The namespaces take turns, so that a busy namespace does not delay the others. A namespace gets no further worker while
it has as many as are free: a single namespace can have half of the workers, two a third each, and some are always left.
So a slow namespace does not delay the others either, such as a namespace with a webhook that does not answer.

Pipelines with a running attempt go first: if more is asked for than the cluster can do, a pipeline waits before it
begins, and not between two stages.
"""

import asyncio
import random  # noqa: TID251  an edge
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from finetune_operator.core.pipeline import Key

BASE_DELAY = 0.5
"""Seconds until a pipeline that could not be reconciled is retried; doubles with each failure in a row."""
MAX_DELAY = 60.0
"""Upper limit of that delay in seconds, before jitter."""
TURNS = 8
"""Of so many turns, each lane behind the first has one of its own, however many pipelines wait before it."""
# Most need no request. They only take the processor's time, while the others wait for answers.
LOW_WORKERS = 2
"""Workers that the pipelines of low priority get at a time."""


@dataclass
class _Delayed:
    at: float
    """By the event loop's clock."""
    timer: asyncio.TimerHandle


class _Lane:
    """Pipelines in the order of their arrival; the namespaces take turns."""

    def __init__(self) -> None:
        self.added_at: dict[Key, float] = {}
        """By the event loop's clock."""
        self._turns: OrderedDict[str, OrderedDict[Key, None]] = OrderedDict()

    def add(self, key: Key, now: float) -> None:
        self.added_at[key] = now
        self._turns.setdefault(key.namespace, OrderedDict())[key] = None

    def remove(self, key: Key) -> None:
        if self.added_at.pop(key, None) is not None:
            keys = self._turns[key.namespace]
            del keys[key]
            if not keys:
                del self._turns[key.namespace]

    def pop(self, full: AbstractSet[str]) -> Key | None:
        """Remove and return the next pipeline of a namespace that is not full; move the namespace behind the others."""
        for namespace, keys in self._turns.items():
            if namespace not in full:
                key = next(iter(keys))
                self._turns.move_to_end(namespace)
                self.remove(key)
                return key
        return None


@dataclass
class WorkQueue:
    """A queue of pipelines; a pipeline that changes all the time waits behind the others after each turn."""

    workers: int = 1 << 30
    """Workers that call `get`."""
    has_running_attempt: Callable[[Key], bool] = lambda _: True
    """Whether an attempt of the pipeline runs, as far as the cache knows: what is queued is often its end."""
    _running: _Lane = field(default_factory=_Lane)
    """Pipelines with a running attempt."""
    _others: _Lane = field(default_factory=_Lane)
    """Pipelines that begin, wait, or are edited or deleted."""
    _low: _Lane = field(default_factory=_Lane)
    """Pipelines that are reconciled only because this replica has not yet: nothing has changed."""
    _processing: set[Key] = field(default_factory=set)
    """Pipelines that a worker has, from `get` to `done`."""
    _low_processing: set[Key] = field(default_factory=set)
    """The pipelines among them that came from `_low`."""
    _dirty: set[Key] = field(default_factory=set)
    """Pipelines that were added again while a worker has them."""
    _delayed: dict[Key, _Delayed] = field(default_factory=dict)
    """Pipelines that are added later."""
    _failures: dict[Key, int] = field(default_factory=dict)
    """Failures in a row."""
    _waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Workers that wait in `get`; the worker that has waited longest is first."""
    _turn: int = 0

    def add(self, key: Key, *, low: bool = False) -> None:
        """Add a pipeline; while a worker has it, mark it dirty, so that `done` adds it."""
        if not low:
            self._cancel_delay(key)
        if key in self._processing:
            self._dirty.add(key)
            return
        lane = self._lane_for(key, low=low)
        for better_or_equal in self._lanes[: self._lanes.index(lane) + 1]:
            if key in better_or_equal.added_at:
                return
        for lower in self._lanes:
            lower.remove(key)
        lane.add(key, asyncio.get_running_loop().time())
        self._wake()

    @property
    def _lanes(self) -> tuple[_Lane, _Lane, _Lane]:
        """The lanes; the first goes first."""
        return self._running, self._others, self._low

    def _lane_for(self, key: Key, *, low: bool) -> _Lane:
        if low:
            return self._low
        return self._running if self.has_running_attempt(key) else self._others

    def add_after(self, key: Key, seconds: float) -> None:
        """Add a pipeline after a delay; of several delays, the first to end counts."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, seconds)
        is_urgent = key in self._running.added_at or key in self._others.added_at
        is_earlier = key in self._delayed and self._delayed[key].at <= at
        # An earlier turn comes anyway.
        if is_urgent or is_earlier:
            return
        self._cancel_delay(key)
        self._delayed[key] = _Delayed(at, loop.call_at(at, self.add, key))

    def add_rate_limited(self, key: Key, base: float = BASE_DELAY) -> float:
        """Add a pipeline after a delay that doubles with each failure in a row; return the delay in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # The exponent is limited, or the power would overflow after some thousand failures.
        delay = min(base * 2.0 ** min(failures - 1, 16), MAX_DELAY)
        # Jitter: pipelines that failed together are retried apart.
        delay *= random.uniform(0.8, 1.2)  # noqa: S311
        self.add_after(key, delay)
        return delay

    def is_dirty(self, key: Key) -> bool:
        """Return whether the pipeline was added again since a worker got it."""
        return key in self._dirty

    def is_processing(self, key: Key) -> bool:
        """Return whether a worker has the pipeline."""
        return key in self._processing

    def forget(self, key: Key) -> None:
        """Reset the pipeline's count of failures."""
        self._failures.pop(key, None)

    def remove(self, key: Key) -> None:
        """Remove a pipeline that no longer exists, with its delay and its count of failures."""
        self._cancel_delay(key)
        self._failures.pop(key, None)
        for lane in self._lanes:
            lane.remove(key)
        self._dirty.discard(key)

    async def get(self) -> Key:
        """Wait for a pipeline and return the next one; no other worker gets it until `done`."""
        key = self._next()
        while key is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                waiter.cancel()
                # The wake-up may have been for this worker.
                self._wake()
                raise
            key = self._next()
        self._processing.add(key)
        self._turn += 1
        # There may be more for another worker.
        self._wake()
        return key

    def _wake(self) -> None:
        """Wake one worker that waits, if there is anything in the queue."""
        while self._waiters and len(self):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _next(self) -> Key | None:
        free = self.workers - len(self._processing)
        busy = Counter(key.namespace for key in self._processing)
        full = {namespace for namespace, count in busy.items() if count >= free}
        turn = (self._turn + 1) % TURNS
        first = None
        if turn == 0:
            first = self._pop_low(full)
        # Half a round after the turn of the low priority.
        elif turn == TURNS // 2:
            first = self._others.pop(full)
        return (
            first
            or self._running.pop(full)
            or self._others.pop(full)
            or self._pop_low(full)
        )

    def _pop_low(self, full: AbstractSet[str]) -> Key | None:
        if len(self._low_processing) >= LOW_WORKERS:
            return None
        key = self._low.pop(full)
        if key:
            self._low_processing.add(key)
        return key

    def done(self, key: Key) -> None:
        """Mark a pipeline as processed; add it again if it is dirty."""
        self._processing.discard(key)
        self._low_processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)
        # The namespace may have been full.
        self._wake()

    def __len__(self) -> int:
        """Return how many pipelines wait for a worker."""
        return sum(len(lane.added_at) for lane in self._lanes)

    def oldest(self) -> float:
        """Return how long the first urgent pipeline has waited, in seconds; 0 if there is none."""
        now = asyncio.get_running_loop().time()
        lanes = (self._running.added_at, self._others.added_at)
        firsts = [next(iter(added_at.values())) for added_at in lanes if added_at]
        return now - min(firsts, default=now)

    def _cancel_delay(self, key: Key) -> None:
        delayed = self._delayed.pop(key, None)
        if delayed:
            delayed.timer.cancel()
