"""The pod of an attempt, as it was last observed: pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from finetune_operator.core.metadata import COMPLETION_INDEX, STAGE, STAGE_CONTAINER
from finetune_operator.kubernetes.translate.object import Object
from finetune_trainer.contract import Failure, TerminationMessage

FINISHED_PHASES = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True)
class ObservedPod:
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
    def created_at(self) -> datetime | None:
        """The time when the pod was created."""
        return time_of(self.raw["metadata"].get("creationTimestamp"))

    @property
    def stage(self) -> str:
        """The stage; empty for a pod without its label."""
        return str((self.raw["metadata"].get("labels") or {}).get(STAGE) or "")

    @property
    def index(self) -> int:
        """The index in an Indexed Job; 0 for the pod of another Job."""
        text = str(
            (self.raw["metadata"].get("labels") or {}).get(COMPLETION_INDEX) or ""
        )
        # isdigit alone accepts characters such as ², which int refuses.
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def memory_limit(self) -> str:
        """The memory limit of the stage's container; empty if it has none."""
        container = _named(self.raw["spec"].get("containers"), STAGE_CONTAINER)
        limits = (container.get("resources") or {}).get("limits") or {}
        return str(limits.get("memory") or "")

    @property
    def node(self) -> str:
        """The node that the pod is bound to; empty before it is scheduled."""
        return str(self.raw["spec"].get("nodeName") or "")

    @property
    def phase(self) -> str:
        """The phase in Kubernetes' terms, or Terminating for a pod that is being deleted."""
        if self.deleted_at and not self.finished:
            return "Terminating"
        return str(self._status.get("phase") or "Pending")

    @property
    def address(self) -> str:
        """The IP address; empty before the pod gets one."""
        return str(self._status.get("podIP") or "")

    @property
    def _status(self) -> Object:
        status: Object = self.raw.get("status") or {}
        return status

    @property
    def _container(self) -> Object:
        return _named(self._status.get("containerStatuses"), STAGE_CONTAINER)

    @property
    def _containers(self) -> list[Object]:
        """The statuses of all init containers and of the stage's container, in the order of their start."""
        return [*self._init_statuses, self._container]

    @property
    def restarts(self) -> int:
        """The largest restart count of the stage's container and the init containers."""
        return max(int(status.get("restartCount") or 0) for status in self._containers)

    @property
    def last_failure(self) -> Object:
        """The latest state.terminated of an init container that failed, else of the stage's container."""
        for status in self._init_statuses:
            for terminated in _terminations(status):
                # The normal end of an init container is no failure.
                if terminated.get("exitCode"):
                    return terminated
        return next(_terminations(self._container), {})

    @property
    def ready(self) -> bool:
        """Whether the pod has not finished and its condition Ready is True."""
        return not self.finished and self.condition("Ready").get("status") == "True"

    @property
    def _init_statuses(self) -> list[Object]:
        statuses: list[Object] = self._status.get("initContainerStatuses") or []
        return statuses

    @property
    def waiting(self) -> Object:
        """The state.waiting of the first init container that waits, else of the stage's container."""
        for status in self._containers:
            waiting: Object | None = (status.get("state") or {}).get("waiting")
            if waiting:
                return waiting
        return {}

    @property
    def terminated(self) -> Object:
        """The state.terminated of the stage's container; empty while it has not ended."""
        return (self._container.get("state") or {}).get("terminated") or {}

    @property
    def started_at(self) -> datetime | None:
        """The time when the process started; None for a pod that the kubelet rejected."""
        running = (self._container.get("state") or {}).get("running") or {}
        return time_of(running.get("startedAt") or self.terminated.get("startedAt"))

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, once its kubelet has reported it."""
        code = self.terminated.get("exitCode")
        if code is None:
            return None
        return int(code)

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
        if not self.succeeded:
            return False
        message = self.termination_message
        return message is not None and message.result is not None

    @property
    def deleted_at(self) -> datetime | None:
        """The end of the grace period, for a pod that is being deleted."""
        return time_of(self.raw["metadata"].get("deletionTimestamp"))

    def condition(self, kind: str) -> Object:
        """Return a condition; empty if the pod does not have it."""
        for condition in self._status.get("conditions") or []:
            if condition["type"] == kind:
                observed: Object = condition
                return observed
        return {}

    @property
    def unschedulable_since(self) -> datetime | None:
        """The time since which no node accepts the pod; None for a pod that is scheduled."""
        scheduled = self.condition("PodScheduled")
        if scheduled.get("status") != "False":
            return None
        return time_of(scheduled.get("lastTransitionTime"))

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
        target = self.condition("DisruptionTarget")
        place = f" on {self.node}" if self.node else ""
        if target.get("status") == "True":
            return f"{target.get('reason')}{place}: {target.get('message', '')}".rstrip(
                ": "
            )
        reason = self._status.get("reason") or ""
        message = self._status.get("message") or ""
        if reason in DISRUPTION_REASONS or message.startswith("Pod was rejected"):
            return f"{reason}{place}: {message}".rstrip(": ")
        if self.terminated.get("reason") in STATUS_UNKNOWN_REASONS:
            return f"the kubelet lost track of the container{place}; the machine may have restarted"
        return None

    @property
    def _deletion(self) -> str | None:
        """The evidence that a client deleted the pod. The Job controller does, too, after another pod has failed."""
        # 137 and 143: SIGKILL and SIGTERM. Any other exit code is the process's own end.
        if self.deleted_at and self.exit_code in {None, 137, 143}:
            place = f" on {self.node}" if self.node else ""
            return f"the pod was deleted{place}"
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


def _named(containers: list[Object] | None, name: str) -> Object:
    """Return the container of this name, or its status; empty if there is none."""
    for container in containers or []:
        if container["name"] == name:
            return container
    return {}


def _terminations(container: Object) -> Iterator[Object]:
    for state in ("state", "lastState"):
        terminated = (container.get(state) or {}).get("terminated")
        if terminated:
            yield terminated


DISRUPTION_REASONS = frozenset(
    {"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity"}
)
"""Reasons in a pod's status with which a kubelet ends or rejects a pod that is not at fault."""
STATUS_UNKNOWN_REASONS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of a container if the kubelet did not observe its end; its exit code is 137 or 255."""


def time_of(text: object) -> datetime | None:
    """Parse a Kubernetes time; None if there is none."""
    return datetime.fromisoformat(text) if isinstance(text, str) else None
