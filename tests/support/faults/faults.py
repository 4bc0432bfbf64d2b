"""The faults that the proxy injects between the operator and the API server."""

import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Literal

_COLLECTION = re.compile(r"/(api/[^/]+|apis/[^/]+/[^/]+)/namespaces/[^/]+/[^/]+")
Kind = Literal["request", "lease", "watch"]


@dataclass(frozen=True)
class Request:
    """One request of the operator."""

    kind: Kind
    """Requests for the Lease are counted apart: how many there are depends on the time only."""
    number: int
    """Number of the request among the requests of its kind, starting at 1."""
    verb: str
    path: str
    query: str

    @property
    def is_write(self) -> bool:
        """Whether the request may change something."""
        return self.verb not in {"GET", "HEAD"}

    @property
    def is_list(self) -> bool:
        """Whether the request reads a collection of a namespace."""
        return (
            self.kind == "request"
            and self.verb == "GET"
            and _COLLECTION.fullmatch(self.path) is not None
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.number}: {self.verb} {self.path}"


async def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Cut:
    """Close the connection, before the request reaches the API server or after it was executed."""

    when: Literal["before", "after"]
    then: Callable[[], Awaitable[None]] = _nothing
    """Called before the connection is closed; a test kills the operator here."""


@dataclass(frozen=True)
class Delay:
    """Hold the request back."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """Answer with an error; the request does not reach the API server."""

    status: HTTPStatus
    reason: str
    retry_after: int | None = None


@dataclass(frozen=True)
class Stale:
    """Answer a list with the body that `Proxy.remember_lists` read earlier."""


class WatchEnd(StrEnum):
    """How an open watch ends."""

    CLOSED = "closed"
    """The stream ends as at its timeout."""
    TRUNCATED = "truncated"
    """The connection is closed in the middle of a line."""
    SILENT = "silent"
    """The connection stays open and delivers nothing more."""
    GONE = "gone"
    """An ERROR event with status 410, then the end: the version was compacted."""


@dataclass(frozen=True)
class EndWatch:
    """End this watch as soon as it is open."""

    how: WatchEnd


Fault = Cut | Delay | Answer | Stale | EndWatch
Rule = Callable[[Request], Fault | None]

CONFLICT = Answer(HTTPStatus.CONFLICT, "Conflict")
INVALID = Answer(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid")
BUSY = Answer(HTTPStatus.TOO_MANY_REQUESTS, "TooManyRequests", retry_after=1)
BROKEN = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError")
UNAVAILABLE = Answer(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable")
EXPIRED = Answer(HTTPStatus.GONE, "Expired")


OF_WRITES = (CONFLICT, INVALID)
"""An API server answers only writes with these."""


def random_faults(chance: random.Random, rate: float, *faults: Fault) -> Rule:
    """Return a rule that injects one of the faults into a share of the requests."""

    def rule(request: Request) -> Fault | None:
        fault = chance.choice(faults) if chance.random() < rate else None
        return None if fault in OF_WRITES and not request.is_write else fault

    return rule


def no_fault(_request: Request) -> None:
    """Return None: every request is passed on."""
