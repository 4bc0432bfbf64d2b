"""The API server's audit log: requests by program and verb, and the bodies of new objects."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from operator_bench.api import NAMESPACE

Object = dict[str, Any]
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
OWN_ACCOUNT = f"system:serviceaccount:{NAMESPACE}:"


def events(log: Path, since: float = 0.0) -> Iterator[Object]:
    """Yield each request since this time (Unix seconds) once; a watch is logged at its start and its end."""
    seen: set[str] = set()
    with log.open() as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # the API server is writing it
            event = json.loads(line)
            if event["auditID"] in seen or _received(event) < since:
                continue
            seen.add(event["auditID"])
            yield event


def _received(event: Object) -> float:
    return datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()


def agent_of(event: Object) -> str:
    """Return the program that sent the request: its service account, or its User-Agent for the administrator's."""
    user = str(event["user"].get("username", ""))
    if user.startswith("system:"):
        return user.rsplit(":", 1)[1]
    return str(event.get("userAgent", "unknown")).split("/", 1)[0]


def is_of(event: Object, account: str) -> bool:
    """Return whether a service account of the benchmark's namespace sent the request."""
    return str(event["user"].get("username", "")) == OWN_ACCOUNT + account


def resource_of(event: Object) -> str:
    """Return the resource, with its subresource."""
    reference = event.get("objectRef") or {}
    parts = (
        reference.get("resource", event["requestURI"].split("?")[0]),
        reference.get("subresource"),
    )
    return "/".join(part for part in parts if part)


@dataclass
class Requests:
    """Numbers of requests."""

    by_agent: dict[str, Counter[str]] = field(default_factory=dict)
    """Program -> verb -> requests."""
    of_account: Counter[str] = field(default_factory=Counter)
    """`verb resource` -> requests of the measured program."""
    errors: Counter[str] = field(default_factory=Counter)
    """`status verb resource` -> failed requests of the measured program."""

    @property
    def all_writes(self) -> int:
        """Return the writes of all programs, without writes of Leases."""
        return sum(
            count
            for verbs in self.by_agent.values()
            for verb, count in verbs.items()
            if verb in WRITES
        )

    def own(self, *verbs: str) -> int:
        """Return the requests of the measured program with one of these verbs."""
        return sum(
            count for key, count in self.of_account.items() if key.split()[0] in verbs
        )

    @property
    def own_writes(self) -> int:
        """Return the writes of the measured program."""
        return self.own(*WRITES)


def count_requests(log: Path, account: str, since: float) -> Requests:
    """Count the requests since this time. Requests for Leases depend on time, not on pipelines, and are left out."""
    requests = Requests()
    for event in events(log, since):
        resource = resource_of(event)
        if resource == "leases":
            continue
        requests.by_agent.setdefault(agent_of(event), Counter())[event["verb"]] += 1
        if is_of(event, account):
            requests.of_account[f"{event['verb']} {resource}"] += 1
            status = (event.get("responseStatus") or {}).get("code", 0)
            if status >= 400:
                requests.errors[f"{status} {event['verb']} {resource}"] += 1
    return requests


def created_objects(log: Path, account: str) -> list[Object]:
    """Return the bodies of the objects that the account created, in order. The audit policy must log them."""
    bodies = []
    for event in events(log):
        is_new = (event.get("responseStatus") or {}).get("code") == 201
        if is_new and is_of(event, account) and "requestObject" in event:
            bodies.append(event["requestObject"])
    return bodies
