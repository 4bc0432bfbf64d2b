"""The pod of an attempt, as it was last observed: pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import ValidationError

from finetune_operator.core.metadata import COMPLETION_INDEX, STAGE, STAGE_CONTAINER
from finetune_operator.kubernetes.translate.object import Object
from finetune_trainer.contract import ExitCode, Failure, TerminationMessage

# The kubelet's clock may be before or behind the API server's.
CLOCK_DIFFERENCE = timedelta(seconds=10)
"""Largest difference between two clocks of the cluster."""
DELETION_SEEN_AT = "deletionSeenAt"
"""Field that the cache adds to a pod: the operator's time at which it first saw this deletion of the pod."""
END_SEEN_AT = "endSeenAt"
"""Field that the cache adds to a pod: the operator's time at which it first saw that the process had ended."""
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
    def job(self) -> str:
        """The name of its Job; empty for the pod of a server."""
        labels = self.raw["metadata"].get("labels") or {}
        return str(labels.get("batch.kubernetes.io/job-name") or "")

    @property
    def memory_limit(self) -> str:
        """The memory limit of the stage's container; empty if it has none."""
        return self.limit_of("memory")

    def limit_of(self, resource: str) -> str:
        """Return a limit of the stage's container, as a quantity; empty if it has none."""
        container = _named(self.raw["spec"].get("containers"), STAGE_CONTAINER)
        limits = (container.get("resources") or {}).get("limits") or {}
        return str(limits.get(resource) or "")

    @property
    def node(self) -> str:
        """The node that the pod is bound to; empty before it is scheduled."""
        return str(self.raw["spec"].get("nodeName") or "")

    @property
    def scheduler(self) -> str:
        """The name of the scheduler that the pod waits for."""
        return str(self.raw["spec"].get("schedulerName") or "default-scheduler")

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
    def status_reason(self) -> str:
        """The reason of the pod itself, such as Evicted; empty if it has none."""
        return str(self._status.get("reason") or "")

    @property
    def status_message(self) -> str:
        """The message beside that reason."""
        return str(self._status.get("message") or "")

    @property
    def container_statuses(self) -> list[Object]:
        """The statuses of all containers but the init containers."""
        statuses: list[Object] = self._status.get("containerStatuses") or []
        return statuses

    @property
    def _container(self) -> Object:
        return _named(self.container_statuses, STAGE_CONTAINER)

    @property
    def _containers(self) -> list[Object]:
        """The statuses of all init containers and of the stage's container, in the order of their start."""
        return [*self.init_statuses, self._container]

    @property
    def restarts(self) -> int:
        """The largest restart count of the stage's container and the init containers."""
        return max(int(status.get("restartCount") or 0) for status in self._containers)

    @property
    def last_failure(self) -> Object:
        """The latest state.terminated of an init container that failed, else of the stage's container."""
        for status in self.init_statuses:
            for terminated in terminations(status):
                # The normal end of an init container is no failure.
                if terminated.get("exitCode"):
                    return terminated
        return next(terminations(self._container), {})

    @property
    def ready(self) -> bool:
        """Whether the pod has not finished and its condition Ready is True."""
        return not self.finished and self.condition("Ready").get("status") == "True"

    @property
    def init_statuses(self) -> list[Object]:
        """The statuses of the init containers, in the order of their start."""
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
    def failed(self) -> bool:
        """Whether a container has failed and none is left, or the kubelet has ended the pod."""
        return self._status.get("phase") == "Failed"

    @property
    def outlived_since(self) -> datetime | None:
        """The time since which the process has ended, but not the pod; None if it has not, or the pod has, too.

        By the operator's clock, if the cache has the pod: the clock of the node may be hours before or behind it.
        """
        if self.finished or self.exit_code is None:
            return None
        seen: datetime | None = self.raw.get(END_SEEN_AT)
        return seen or self.finished_at

    @property
    def has_result(self) -> bool:
        """Whether the stage's container has succeeded and left a result, whatever the other containers do."""
        if self.exit_code != ExitCode.DONE:
            return False
        message = self.termination_message
        return message is not None and message.result is not None

    @property
    def deleted_at(self) -> datetime | None:
        """The end of the grace period, for a pod that is being deleted."""
        return time_of(self.raw["metadata"].get("deletionTimestamp"))

    @property
    def grace_ended_at(self) -> datetime | None:
        """The end of the grace period by the operator's clock; None for a pod that it has not seen being deleted.

        The API server's clock may be hours before or behind the operator's. So it is the time at which the operator
        first saw this deletion, and the grace period, which is a duration.
        """
        seen: datetime | None = self.raw.get(DELETION_SEEN_AT)
        if seen is None:
            return None
        grace = self.raw["metadata"].get("deletionGracePeriodSeconds") or 0
        return seen + timedelta(seconds=int(grace))

    def condition(self, kind: str) -> Object:
        """Return a condition; empty if the pod does not have it."""
        for condition in self._status.get("conditions") or []:
            if condition["type"] == kind:
                observed: Object = condition
                return observed
        return {}

    @property
    def unschedulable_since(self) -> datetime | None:
        """The time since which no node accepts the pod; None for a pod that is scheduled, or held back by a gate."""
        scheduled = self.condition("PodScheduled")
        if scheduled.get("status") != "False" or self.is_gated:
            return None
        return time_of(scheduled.get("lastTransitionTime"))

    @property
    def is_gated(self) -> bool:
        """Whether the scheduler does not look at the pod yet, because another controller holds it back."""
        return self.condition("PodScheduled").get("reason") == "SchedulingGated"

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
        reason = self.status_reason
        message = self.status_message
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
            if self._ended_before_its_deletion:
                return None
            place = f" on {self.node}" if self.node else ""
            return f"the pod was deleted{place}"
        return None

    @property
    def _ended_before_its_deletion(self) -> bool:
        """Whether the process had ended when the pod was deleted, so that only sidecars were left."""
        grace = self.raw["metadata"].get("deletionGracePeriodSeconds")
        if self.deleted_at is None or self.finished_at is None or grace is None:
            return False
        deletion = self.deleted_at - timedelta(seconds=int(grace))
        return self.finished_at < deletion - CLOCK_DIFFERENCE

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


def terminations(container: Object) -> Iterator[Object]:
    """Yield the state.terminated of a container's status, the newest first."""
    for state in ("state", "lastState"):
        terminated = (container.get(state) or {}).get("terminated")
        if terminated:
            yield terminated


DISRUPTION_REASONS = frozenset(
    {
        "Evicted",
        "NodeLost",
        "NodeShutdown",
        "Shutdown",
        "Terminated",
        "Preempting",
        "NodeAffinity",
    }
)
"""Reasons in a pod's status with which a kubelet ends or rejects a pod that is not at fault."""
STATUS_UNKNOWN_REASONS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of a container if the kubelet did not observe its end; its exit code is 137 or 255."""


def time_of(text: object) -> datetime | None:
    """Parse a Kubernetes time; None if there is none."""
    return datetime.fromisoformat(text) if isinstance(text, str) else None
