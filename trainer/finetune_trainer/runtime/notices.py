"""Notices of a machine's end, read from its cloud's metadata endpoint in a daemon thread, by the standard library.

The thread only reads: it acknowledges no event, because that would let the cloud end the machine earlier. Whatever the
endpoint answers, or if it does not, the stage runs on.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPMessage
from typing import Any, ClassVar, Protocol
from urllib.parse import quote, urlsplit

from typing_extensions import override

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.progress import log_line

POLL_SECONDS = 5.0
"""Between two looks. EC2 announces an end 120 s before it, Azure 30 s."""
TIMEOUT_SECONDS = 2.0
MAX_BYTES = 256 << 10
"""Bytes read of an answer."""
MAX_NOTICES = 64
"""Distinct notices of one process that are passed on."""
MAX_CHARACTERS = 64
"""Limit of each text of a notice."""


@dataclass(frozen=True)
class Notice:
    """An announcement that the machine will end."""

    cloud: str
    event: str
    """What will happen, in the cloud's own word."""
    time: str = ""
    """When, as the cloud writes it; empty: it does not say."""

    @override
    def __str__(self) -> str:
        """Return the notice as the subject of a sentence of the log."""
        return f"{self.cloud} announces {self.event}" + (f" at {self.time}" if self.time else "")


class Endpoint(Protocol):
    """The metadata endpoint of one cloud."""

    def poll(self) -> Iterable[Notice]:
        """Return the notices that it has now. Raise OSError, HTTPException or ValueError if it cannot be read."""
        ...


@dataclass(frozen=True)
class Answer:
    """The answer to one request."""

    status: int
    headers: HTTPMessage
    content: bytes

    def json(self) -> dict[str, Any]:
        """Return the content as a JSON object; raise ValueError if it is none, or if the status is not 200."""
        if self.status != HTTPStatus.OK:
            raise ValueError(f"it answered with status {self.status}")
        found = json.loads(self.content)
        if not isinstance(found, dict):
            raise ValueError("it answered with JSON that is no object")  # noqa: TRY004  as for JSON that is none
        return found


def fetch(
    base: str,
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    seconds: float = TIMEOUT_SECONDS,
) -> Answer:
    """Send a request without a proxy and without following a redirect; `seconds` limits each wait for the server."""
    parts = urlsplit(base)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read(MAX_BYTES))
    finally:
        connection.close()


class Ec2:
    """EC2's instance metadata, version 2: every request carries a token, which expires.

    Spot interruption: 404 until the notice, then {"action", "time"}. Rebalance recommendation: {"noticeTime"}.
    """

    TOKEN_SECONDS: ClassVar = 21600
    ACTION = "/latest/meta-data/spot/instance-action"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(self, base: str) -> None:
        self._base, self._token = base, ""

    def poll(self) -> list[Notice]:
        """Return the interruption and the recommendation, of which there may be neither."""
        notices = []
        if (action := self._read(self.ACTION)) is not None:
            notices.append(Notice("EC2", _text(action.get("action")), _text(action.get("time"))))
        if (rebalance := self._read(self.REBALANCE)) is not None:
            notices.append(
                Notice("EC2", "a rebalance recommendation", _text(rebalance.get("noticeTime")))
            )
        return notices

    def _read(self, path: str) -> dict[str, Any] | None:
        answer = self._get(path)
        if answer.status == HTTPStatus.UNAUTHORIZED:  # the token has expired
            self._token = ""
            answer = self._get(path)
        return None if answer.status == HTTPStatus.NOT_FOUND else answer.json()

    def _get(self, path: str) -> Answer:
        self._token = self._token or self._new_token()
        return fetch(self._base, path, {"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_SECONDS)}
        answer = fetch(self._base, "/latest/api/token", lifetime, method="PUT")
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"it gave no token and answered with status {answer.status}")
        return answer.content.decode("ascii").strip()


class Gce:
    """Compute Engine's metadata server: `preempted` is TRUE from the moment of the preemption, 30 s before the end.

    The request hangs until the value is another than that of `last_etag`, or until `timeout_sec`.
    """

    PATH = "/computeMetadata/v1/instance/preempted"
    WAIT_SECONDS = 30
    FLAVOR = ("Metadata-Flavor", "Google")

    def __init__(self, base: str) -> None:
        self._base, self._etag = base, "0"

    def poll(self) -> list[Notice]:
        """Wait for a change and return the preemption, if there is one."""
        etag = quote(self._etag, safe="")
        query = f"wait_for_change=true&timeout_sec={self.WAIT_SECONDS}&last_etag={etag}"
        path = f"{self.PATH}?{query}"
        answer = fetch(
            self._base, path, dict([self.FLAVOR]), seconds=self.WAIT_SECONDS + TIMEOUT_SECONDS
        )
        if answer.headers.get(self.FLAVOR[0]) != self.FLAVOR[1]:
            raise ValueError(f"its answer lacks the header {': '.join(self.FLAVOR)}")
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"it answered with status {answer.status}")
        self._etag = _text(answer.headers.get("ETag")) or "0"
        return [Notice("GCE", "preemption")] if answer.content.strip() == b"TRUE" else []


class Azure:
    """Azure's scheduled events, which concern all machines of a scale set: only those of this machine count."""

    PATH = "/metadata/scheduledevents?api-version=2020-07-01"
    NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    HEADERS: ClassVar = {"Metadata": "true"}
    EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"})

    def __init__(self, base: str) -> None:
        self._base, self._name = base, ""

    def poll(self) -> list[Notice]:
        """Return the scheduled events that end or pause this machine."""
        events = fetch(self._base, self.PATH, self.HEADERS).json().get("Events")
        found = [one for one in events if isinstance(one, dict)] if isinstance(events, list) else []
        return [
            Notice("Azure", _text(one["EventType"]), _text(one.get("NotBefore")))
            for one in found
            if one.get("EventType") in self.EVENTS and self._is_concerned(one.get("Resources"))
        ]

    def _is_concerned(self, machines: object) -> bool:
        """Return whether this machine is among them; also if one of the two is unknown."""
        self._name = self._name or self._own_name()
        return (
            not (machines and isinstance(machines, list) and self._name) or self._name in machines
        )

    def _own_name(self) -> str:
        answer = fetch(self._base, self.NAME, self.HEADERS)
        return (
            answer.content.decode(errors="replace").strip()
            if answer.status == HTTPStatus.OK
            else ""
        )


ENDPOINTS: dict[str, Callable[[str], Endpoint]] = {"EC2": Ec2, "GCE": Gce, "Azure": Azure}


@contextmanager
def watch_notices(environment: Environment, on_notice: Callable[[str], None]) -> Iterator[None]:
    """Watch the endpoint that the environment names, if any, while the context is open; pass on each notice once."""
    over = threading.Event()
    if environment.interruption_notices:
        endpoint = ENDPOINTS[environment.interruption_notices](environment.metadata_endpoint)
        threading.Thread(
            target=_watch, args=(endpoint, on_notice, over), daemon=True, name="notices"
        ).start()
    try:
        yield
    finally:
        over.set()  # without waiting: a request may hang


def _watch(endpoint: Endpoint, on_notice: Callable[[str], None], over: threading.Event) -> None:
    known: set[Notice] = set()
    problem = ""
    while not over.is_set():
        try:
            for notice in endpoint.poll():
                if notice not in known and len(known) < MAX_NOTICES:
                    known.add(notice)
                    on_notice(str(notice))
        except Exception as error:  # noqa: BLE001  no answer of a server may end the thread
            if type(error).__name__ != problem:  # its text may change with each answer
                problem = type(error).__name__
                log_line(
                    f"interruption notices: the metadata endpoint cannot be read: {problem}: {_text(error)}"
                )
        over.wait(POLL_SECONDS)


def _text(value: object) -> str:
    """Return a text of another program for the log: one line, and not long."""
    return "".join(letter for letter in str(value or "") if letter.isprintable())[:MAX_CHARACTERS]
