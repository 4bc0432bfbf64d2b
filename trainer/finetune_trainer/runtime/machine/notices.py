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
from finetune_trainer.runtime.progress.progress import log_line

# EC2 announces an end 120 s before it, Azure 30 s before it.
POLL_SECONDS = 5.0
"""Time between two requests."""
TIMEOUT_SECONDS = 2.0
# An endpoint that misbehaves must neither fill the memory nor the log.
MAX_BYTES = 256 << 10
"""Bytes read of an answer."""
MAX_NOTICES = 64
"""Distinct notices of a process that are passed on."""
MAX_CHARACTERS = 64
"""Limit of each text of a notice."""


@dataclass(frozen=True)
class Notice:
    """An announcement that the machine will end."""

    cloud: str
    event: str
    """The event that will happen, in the cloud's own word."""
    time: str = ""
    """The time of the event as the cloud writes it; empty if the cloud does not say."""

    @override
    def __str__(self) -> str:
        """Return the notice as the subject of a sentence of the log."""
        text = f"{self.cloud} announces {self.event}"
        if self.time:
            text += f" at {self.time}"
        return text


class Endpoint(Protocol):
    """The metadata endpoint of a cloud."""

    def poll(self) -> Iterable[Notice]:
        """Return the notices that it has now. Raise OSError, HTTPException or ValueError if reading it fails."""
        ...


@dataclass(frozen=True)
class MetadataResponse:
    """The answer to a request."""

    status: int
    headers: HTTPMessage
    content: bytes

    def json(self) -> dict[str, Any]:
        """Return the content as a JSON object; raise ValueError if it is no object, or if the status is not 200."""
        if self.status != HTTPStatus.OK:
            raise ValueError(f"it answered with status {self.status}")
        value = json.loads(self.content)
        if not isinstance(value, dict):
            raise ValueError("it answered with JSON that is no object")  # noqa: TRY004  as for content that is no JSON
        return value


def fetch(
    base: str,
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    seconds: float = TIMEOUT_SECONDS,
) -> MetadataResponse:
    """Send a request without a proxy and without following a redirect; `seconds` limits each wait for the server."""
    parts = urlsplit(base)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        return MetadataResponse(
            response.status, response.headers, response.read(MAX_BYTES)
        )
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
        self._base = base
        self._token = ""

    def poll(self) -> list[Notice]:
        """Return the interruption and the recommendation, if there are any."""
        notices = []
        action = self._read(self.ACTION)
        if action is not None:
            notices.append(
                Notice("EC2", _text(action.get("action")), _text(action.get("time")))
            )
        rebalance = self._read(self.REBALANCE)
        if rebalance is not None:
            time = _text(rebalance.get("noticeTime"))
            notices.append(Notice("EC2", "a rebalance recommendation", time))
        return notices

    def _read(self, path: str) -> dict[str, Any] | None:
        answer = self._get(path)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            # The token has expired.
            self._token = ""
            answer = self._get(path)
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        return answer.json()

    def _get(self, path: str) -> MetadataResponse:
        self._token = self._token or self._new_token()
        return fetch(self._base, path, {"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_SECONDS)}
        answer = fetch(self._base, "/latest/api/token", lifetime, method="PUT")
        if answer.status != HTTPStatus.OK:
            raise ValueError(
                f"it gave no token and answered with status {answer.status}"
            )
        return answer.content.decode("ascii").strip()


class Gce:
    """Compute Engine's metadata server: `preempted` is TRUE from the moment of the preemption, 30 s before the end.

    The request hangs until the value has another tag than `last_etag`, or until `timeout_sec`.
    """

    PATH = "/computeMetadata/v1/instance/preempted"
    WAIT_SECONDS = 30
    FLAVOR = ("Metadata-Flavor", "Google")

    def __init__(self, base: str) -> None:
        self._base = base
        # No value has this tag, so the first answer comes at once.
        self._etag = "0"

    def poll(self) -> list[Notice]:
        """Wait for a change and return the preemption, if there is any."""
        etag = quote(self._etag, safe="")
        query = f"wait_for_change=true&timeout_sec={self.WAIT_SECONDS}&last_etag={etag}"
        path = f"{self.PATH}?{query}"
        seconds = self.WAIT_SECONDS + TIMEOUT_SECONDS
        answer = fetch(self._base, path, dict([self.FLAVOR]), seconds=seconds)
        # Google's own check of an answer: without this header, another server has answered.
        name, value = self.FLAVOR
        if answer.headers.get(name) != value:
            raise ValueError(f"its answer lacks the header {': '.join(self.FLAVOR)}")
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"it answered with status {answer.status}")
        self._etag = _text(answer.headers.get("ETag")) or "0"
        if answer.content.strip() == b"TRUE":
            return [Notice("GCE", "preemption")]
        return []


class Azure:
    """Azure's scheduled events, which concern all machines of a scale set: only events of this machine count."""

    PATH = "/metadata/scheduledevents?api-version=2020-07-01"
    NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    HEADERS: ClassVar = {"Metadata": "true"}
    EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"})

    def __init__(self, base: str) -> None:
        self._base = base
        self._name = ""

    def poll(self) -> list[Notice]:
        """Return the scheduled events that end or pause this machine."""
        events = fetch(self._base, self.PATH, self.HEADERS).json().get("Events")
        if not isinstance(events, list):
            return []
        notices = []
        for event in events:
            if isinstance(event, dict) and self._ends_this_machine(event):
                time = _text(event.get("NotBefore"))
                notices.append(Notice("Azure", _text(event["EventType"]), time))
        return notices

    def _ends_this_machine(self, event: dict[str, Any]) -> bool:
        return event.get("EventType") in self.EVENTS and self._is_concerned(
            event.get("Resources")
        )

    def _is_concerned(self, machines: object) -> bool:
        """Return whether this machine is among them, or True if the machines or this machine's name are unknown."""
        self._name = self._name or self._own_name()
        # A save too many costs seconds. A missed notice costs the steps since the last checkpoint.
        if not self._name or not machines or not isinstance(machines, list):
            return True
        return self._name in machines

    def _own_name(self) -> str:
        answer = fetch(self._base, self.NAME, self.HEADERS)
        if answer.status != HTTPStatus.OK:
            return ""
        return answer.content.decode(errors="replace").strip()


ENDPOINTS: dict[str, Callable[[str], Endpoint]] = {
    "EC2": Ec2,
    "GCE": Gce,
    "Azure": Azure,
}


@contextmanager
def watch_notices(
    environment: Environment, on_notice: Callable[[str], None]
) -> Iterator[None]:
    """Watch the endpoint that the environment names, if any, while the context is open; pass on each notice once."""
    over = threading.Event()
    if environment.interruption_notices:
        endpoint = ENDPOINTS[environment.interruption_notices](
            environment.metadata_endpoint
        )
        threading.Thread(
            target=_watch, args=(endpoint, on_notice, over), daemon=True, name="notices"
        ).start()
    try:
        yield
    finally:
        # Without waiting for the thread: a request may hang.
        over.set()


def _watch(
    endpoint: Endpoint, on_notice: Callable[[str], None], over: threading.Event
) -> None:
    known: set[Notice] = set()
    problem = ""
    while not over.is_set():
        try:
            for notice in endpoint.poll():
                if notice not in known and len(known) < MAX_NOTICES:
                    known.add(notice)
                    on_notice(str(notice))
        except Exception as error:  # noqa: BLE001  no answer of a server may end the thread
            kind = type(error).__name__
            # A problem is logged once. Its kind identifies it, because its text may change with each answer.
            if kind != problem:
                problem = kind
                log_line(
                    f"interruption notices: the metadata endpoint cannot be read: {kind}: {_text(error)}"
                )
        over.wait(POLL_SECONDS)


def _text(value: object) -> str:
    """Return a text of another program for the log: a single line of at most MAX_CHARACTERS."""
    printable = "".join(letter for letter in str(value or "") if letter.isprintable())
    return printable[:MAX_CHARACTERS]
