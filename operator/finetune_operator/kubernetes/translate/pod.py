"""The pod of an attempt, as it was last observed: pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from finetune_operator.core.metadata import COMPLETION_INDEX, STAGE, STAGE_CONTAINER
from finetune_trainer.contract import Failure, TerminationMessage

Object = dict[str, Any]
FINISHED_PHASES = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True)
class Pod:
    """The latest version of a pod. A deleted pod keeps its termination message here, for Kubernetes does not."""

    raw: Object
    gone: bool = False
    """Whether the pod no longer exists."""

    @property
    def name(self) -> str:
        """The pod's name."""
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        """The uid, which tells pods of the same name apart."""
        return str(self.raw["metadata"]["uid"])

    @property
    def stage(self) -> str:
        """The stage; empty for a pod without its label."""
        return str((self.raw["metadata"].get("labels") or {}).get(STAGE) or "")

    @property
    def index(self) -> int:
        """The index in an Indexed Job; 0 for the pod of another Job."""
        text = str((self.raw["metadata"].get("labels") or {}).get(COMPLETION_INDEX) or "")
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def memory_limit(self) -> str:
        """The memory limit of the stage's container; empty where it has none."""
        containers = self.raw["spec"].get("containers") or []
        resources = next(
            (one.get("resources") or {} for one in containers if one["name"] == STAGE_CONTAINER), {}
        )
        return str((resources.get("limits") or {}).get("memory") or "")

    @property
    def node(self) -> str:
        """The node that the pod is bound to; empty before it is scheduled."""
        return str(self.raw["spec"].get("nodeName") or "")

    @property
    def phase(self) -> str:
        """The phase in Kubernetes' terms, or Terminating for a pod that is being deleted."""
        return (
            "Terminating"
            if self.deleted_at and not self.finished
            else str(self._status.get("phase") or "Pending")
        )

    @property
    def address(self) -> str:
        """The IP address; empty before the pod gets one."""
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
        """The largest restart count of the stage's container and the init containers."""
        return max(
            (int(one.get("restartCount") or 0) for one in (*self._init_statuses, self._container)),
            default=0,
        )

    @property
    def last_failure(self) -> Object:
        """The latest state.terminated of an init container that failed, else of the stage's container."""
        for one in self._init_statuses:
            for terminated in _terminations(one):
                if terminated.get("exitCode"):
                    return terminated
        return next(_terminations(self._container), {})

    @property
    def ready(self) -> bool:
        """Whether the pod has not finished and its condition Ready is True."""
        return not self.finished and self.condition("Ready").get("status") == "True"

    @property
    def _init_statuses(self) -> list[Object]:
        found: list[Object] = self._status.get("initContainerStatuses") or []
        return found

    @property
    def waiting(self) -> Object:
        """The state.waiting of the first init container that waits, else of the stage's container."""
        states = (
            (one.get("state") or {}).get("waiting")
            for one in (*self._init_statuses, self._container)
        )
        return next((found for found in states if found), {})

    @property
    def terminated(self) -> Object:
        """The state.terminated of the stage's container; empty while it has not ended."""
        return (self._container.get("state") or {}).get("terminated") or {}

    @property
    def started_at(self) -> datetime | None:
        """The time when the process started; None for a pod that the kubelet rejected."""
        running = (self._container.get("state") or {}).get("running") or {}
        return time_of(
            running.get("startedAt")
            or (self.terminated.get("startedAt") if self.terminated else None)
        )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, once its kubelet has reported it."""
        code = self.terminated.get("exitCode")
        return int(code) if code is not None else None

    @property
    def finished(self) -> bool:
        """Whether no process of the pod is left."""
        return self.gone or self._status.get("phase") in FINISHED_PHASES

    @property
    def succeeded(self) -> bool:
        """Whether all containers have ended with exit code 0."""
        return self._status.get("phase") == "Succeeded"

    @property
    def has_result(self) -> bool:
        """Whether the pod has succeeded and its stage's container has left a result."""
        message = self.termination_message if self.succeeded else None
        return message is not None and message.result is not None

    @property
    def deleted_at(self) -> datetime | None:
        """The end of the grace period, for a pod that is being deleted."""
        return time_of(self.raw["metadata"].get("deletionTimestamp"))

    def condition(self, kind: str) -> Object:
        """Return a condition; empty where the pod does not have it."""
        conditions = self._status.get("conditions") or []
        return next((one for one in conditions if one["type"] == kind), {})

    @property
    def unschedulable_since(self) -> datetime | None:
        """The time since which no node accepts the pod; None for a pod that is scheduled."""
        scheduled = self.condition("PodScheduled")
        return (
            time_of(scheduled.get("lastTransitionTime"))
            if scheduled.get("status") == "False"
            else None
        )

    @property
    def finished_at(self) -> datetime | None:
        """The time when the process ended."""
        return time_of(self.terminated.get("finishedAt"))

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the process was killed for memory."""
        return self.terminated.get("reason") == "OOMKilled"

    @property
    def disruption(self) -> str | None:
        """The evidence that the pod was evicted, rejected or deleted, or that its node was lost."""
        return self.eviction or self._deletion

    @property
    def eviction(self) -> str | None:
        """The evidence that the pod was evicted or rejected, or that its node was lost."""
        found = self.condition("DisruptionTarget")
        where = f" on {self.node}" if self.node else ""
        if found.get("status") == "True":
            return f"{found.get('reason')}{where}: {found.get('message', '')}".rstrip(": ")
        reason, message = self._status.get("reason") or "", self._status.get("message") or ""
        if reason in DISRUPTION_REASONS or message.startswith("Pod was rejected"):
            return f"{reason}{where}: {message}".rstrip(": ")
        if self.terminated.get("reason") in STATUS_UNKNOWN_REASONS:
            return f"the kubelet lost track of the container{where}; the machine may have restarted"
        return None

    @property
    def _deletion(self) -> str | None:
        """The evidence that a client deleted the pod. The Job controller does, too, after another pod has failed."""
        if self.deleted_at and self.exit_code in {None, 137, 143}:
            return "the pod was deleted" + (f" on {self.node}" if self.node else "")
        return None

    @property
    def termination_text(self) -> str:
        """The termination message as the process wrote it."""
        return str(self.terminated.get("message") or "").strip()

    @property
    def termination_message(self) -> TerminationMessage | None:
        """The parsed termination message; text that is not the trainer's JSON becomes a failure's message."""
        text = self.termination_text
        if not text:
            return None
        try:
            return TerminationMessage.model_validate_json(text)
        except ValidationError:
            return TerminationMessage(failure=Failure(message=text))


def _terminations(container: Object) -> Iterator[Object]:
    for state in ("state", "lastState"):
        if terminated := (container.get(state) or {}).get("terminated"):
            yield terminated


DISRUPTION_REASONS = frozenset(
    {"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity"}
)
"""Reasons in a pod's status with which a kubelet ends or rejects a pod that is not at fault."""
STATUS_UNKNOWN_REASONS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of a container whose end the kubelet did not observe; its exit code is 137 or 255."""


def time_of(text: object) -> datetime | None:
    """Parse a Kubernetes time; None where there is none."""
    return datetime.fromisoformat(text) if isinstance(text, str) else None
