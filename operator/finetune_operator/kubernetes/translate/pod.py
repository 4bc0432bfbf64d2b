"""The one pod of an attempt, as it was last seen: pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from finetune_operator.kubernetes.resources.job import STAGE_CONTAINER
from finetune_trainer.contract import Failure, TerminationMessage

Object = dict[str, Any]
FINISHED_PHASES = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True)
class Pod:
    """What a watch told last; a pod that is gone keeps its last words here, for Kubernetes does not keep them."""

    raw: Object
    gone: bool = False

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        """What no other pod of its name has."""
        return str(self.raw["metadata"]["uid"])

    @property
    def node(self) -> str:
        """Where it was put, if it was."""
        return str(self.raw["spec"].get("nodeName") or "")

    @property
    def phase(self) -> str:
        """In Kubernetes' words, or Terminating once somebody has deleted it."""
        return "Terminating" if self.deleted_at and not self.finished else str(self._status.get("phase") or "Pending")

    @property
    def address(self) -> str:
        """Its IP address, once it has one."""
        return str(self._status.get("podIP") or "")

    @property
    def _status(self) -> Object:
        found: Object = self.raw.get("status") or {}
        return found

    @property
    def _container(self) -> Object:
        statuses = self._status.get("containerStatuses") or []
        return next((one for one in statuses if one["name"] == STAGE_CONTAINER), {})

    @property
    def restarts(self) -> int:
        """How often its process, or one that comes before it, was started again."""
        return max((int(one.get("restartCount") or 0) for one in (*self._init_statuses, self._container)), default=0)

    @property
    def last_failure(self) -> Object:
        """Give the last state.terminated of a process that was started again, or of one that came before it."""
        for one in self._init_statuses:
            for ended in _terminations(one):
                if ended.get("exitCode"):
                    return ended
        return next(_terminations(self._container), {})

    @property
    def ready(self) -> bool:
        """Whether it says that it can be asked."""
        return not self.finished and self.condition("Ready").get("status") == "True"

    @property
    def _init_statuses(self) -> list[Object]:
        found: list[Object] = self._status.get("initContainerStatuses") or []
        return found

    @property
    def waiting(self) -> Object:
        """Give state.waiting of the container, or of the one that it waits for."""
        states = ((one.get("state") or {}).get("waiting") for one in (*self._init_statuses, self._container))
        return next((found for found in states if found), {})

    @property
    def terminated(self) -> Object:
        """Give the container's state.terminated."""
        return (self._container.get("state") or {}).get("terminated") or {}

    @property
    def started_at(self) -> datetime | None:
        """When the process started; a pod that was turned away had none."""
        running = (self._container.get("state") or {}).get("running") or {}
        return time_of(running.get("startedAt") or (self.terminated.get("startedAt") if self.terminated else None))

    @property
    def exit_code(self) -> int | None:
        """Of the process, once it has ended in sight of its kubelet."""
        code = self.terminated.get("exitCode")
        return int(code) if code is not None else None

    @property
    def finished(self) -> bool:
        """Whether no process of it is left."""
        return self.gone or self._status.get("phase") in FINISHED_PHASES

    @property
    def deleted_at(self) -> datetime | None:
        """When its grace period ends, once somebody has deleted it."""
        return time_of(self.raw["metadata"].get("deletionTimestamp"))

    def condition(self, kind: str) -> Object:
        """Give a condition; empty where it is not there."""
        conditions = self._status.get("conditions") or []
        return next((one for one in conditions if one["type"] == kind), {})

    @property
    def disruption(self) -> str | None:
        """Say who took its node or its right to run, where there is evidence."""
        found = self.condition("DisruptionTarget")
        where = f" on {self.node}" if self.node else ""
        if found.get("status") == "True":
            return f"{found.get('reason')}{where}: {found.get('message', '')}".rstrip(": ")
        reason, message = self._status.get("reason") or "", self._status.get("message") or ""
        if reason in DISRUPTION_REASONS or message.startswith("Pod was rejected"):
            return f"{reason}{where}: {message}".rstrip(": ")
        if self.terminated.get("reason") in STATUS_UNKNOWN_REASONS:
            return f"the node lost sight of it{where}, as after a restart of the machine"
        if self.deleted_at and self.exit_code in {None, 137, 143}:
            return f"somebody deleted its pod{where}"
        return None

    @property
    def termination_message(self) -> TerminationMessage | None:
        """Read its last words; what is not ours is a failure in somebody else's words."""
        text = str(self.terminated.get("message") or "").strip()
        if not text:
            return None
        try:
            return TerminationMessage.model_validate_json(text)
        except ValidationError:
            return TerminationMessage(failure=Failure(message=text))


def _terminations(container: Object) -> Iterator[Object]:
    for state in ("state", "lastState"):
        if ended := (container.get(state) or {}).get("terminated"):
            yield ended


DISRUPTION_REASONS = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity"})
"""Reasons of a pod's own status with which a kubelet ends or refuses a pod that did nothing wrong."""
STATUS_UNKNOWN_REASONS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of a container that ended while nobody looked; exit code 137 or 255."""


def time_of(text: object) -> datetime | None:
    """Read a Kubernetes time."""
    return datetime.fromisoformat(text) if isinstance(text, str) else None
