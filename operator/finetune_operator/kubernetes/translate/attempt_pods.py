"""The pods of an attempt as a single process: its start, the cause of its end, and its result: pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import cached_property

from finetune_operator.core.attempts.endings import SIGNAL_EXIT_CODES
from finetune_operator.core.observation import PodFault
from finetune_operator.kubernetes.translate.faults import fault_of
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import ObservedPod, time_of
from finetune_operator.kubernetes.translate.sidecars import failed_sidecar
from finetune_trainer.contract import ExitCode, TerminationMessage

# The latest time there is, so that a known time comes first.
EVER = datetime.max.replace(tzinfo=UTC)
"""An end whose time is not known."""


class CauseRank(IntEnum):
    """How well the end of a pod explains the end of its attempt: the lowest rank is the cause."""

    OUT_OF_MEMORY = 0
    EVICTED = 1
    FAILED = 2
    KILLED = 3
    """A signal ended its process."""
    DELETED = 4
    STOPPED = 5
    """The pod was stopped and gives no other reason."""
    SUCCEEDED = 6


@dataclass(frozen=True)
class AttemptPods:
    """The known pods of one attempt, at most one for each index, in the order of their indexes."""

    pods: Sequence[ObservedPod]
    count: int
    """Number of pods of the attempt, whether they are known or not."""

    @classmethod
    def of(cls, job: Object | None, pods: Sequence[ObservedPod]) -> "AttemptPods":
        """Return the pods of a Job; without the Job there are as many as their indexes say."""
        if job:
            return cls(pods, completions_of(job))
        return cls(pods, max((pod.index + 1 for pod in pods), default=1))

    @property
    def first(self) -> ObservedPod | None:
        """The pod with index 0, which alone writes and has the result."""
        for pod in self.pods:
            if pod.index == 0:
                return pod
        return None

    @property
    def absent(self) -> int:
        """Number of unknown pods: not created yet, or gone without a trace."""
        return max(0, self.count - len(self.pods))

    @property
    def live(self) -> bool:
        """Whether a process of a known pod may still run."""
        return any(not pod.finished for pod in self.pods)

    def started_at(self, *, is_over: bool) -> datetime | None:
        """Return when the last process started; None until all have started. Pods may be gone after the attempt."""
        started = [pod.started_at for pod in self.pods]
        known = [time for time in started if time]
        all_started = bool(known) and len(known) == len(started)
        if all_started and (is_over or not self.absent):
            return max(known)
        return None

    @property
    def finished_at(self) -> datetime | None:
        """When the last process ended; None if no end is known."""
        ends = [pod.finished_at for pod in self.pods]
        return max((end for end in ends if end), default=None)

    @property
    def has_result(self) -> bool:
        """Whether the first pod has succeeded with a result."""
        return bool(self.first and self.first.has_result)

    @property
    def outlived_since(self) -> datetime | None:
        """Since when a process that ends the attempt has ended, while its pod has not; None if there is none.

        The first process decides by its end, and any other by a failure. The others end because of it.
        """
        times = [
            pod.outlived_since
            for pod in self.pods
            if pod.index == 0 or pod.exit_code != ExitCode.DONE
        ]
        return min((time for time in times if time), default=None)

    @property
    def fault(self) -> PodFault | None:
        """What ended the pod that ended the attempt, if it has a reason of its own."""
        return fault_of(self.ended_by) if self.ended_by else None

    @property
    def sidecar(self) -> str:
        """Which container besides the stage's has failed, of the pod that ended the attempt; empty if none has."""
        return failed_sidecar(self.ended_by) if self.ended_by else ""

    @property
    def has_ended(self) -> bool:
        """Whether no process of any pod is left."""
        return not self.absent and not self.live

    @cached_property
    def ended_by(self) -> ObservedPod | None:
        """The pod that ended the attempt: the other pods end because of it. None while no pod has ended.

        Certain evidence comes first, then a fault of a pod's own. The Job controller deletes the other pods after the
        first has failed, so a deletion alone explains nothing that a failure can explain. Exit code 75 means that the
        process was stopped, or that another process has gone.
        """
        ended = [
            pod
            for pod in self.pods
            if pod.exit_code is not None or pod.disruption or fault_of(pod)
        ]
        return min(
            ended, key=lambda pod: (_rank(pod), _ended_at(pod), pod.index), default=None
        )

    @property
    def culprit(self) -> str:
        """The name of that pod for people; empty for the only pod, and if all pods were stopped."""
        pod = self.ended_by
        if pod is None or self.count == 1 or _rank(pod) >= CauseRank.STOPPED:
            return ""
        return f"pod {pod.index}"

    def message_of(self, pod: ObservedPod | None) -> TerminationMessage | None:
        """Return the termination message of the pod that ended the attempt, with the progress of the first pod."""
        message = _message(pod)
        first = _message(self.first)
        if pod is self.first or first is None:
            return message
        # Only the first pod writes checkpoints, so it alone knows what was saved.
        failure = message.failure if message else None
        return TerminationMessage(
            failure=failure, interruption=first.interruption, progress=first.progress
        )

    @property
    def unplaced(self) -> Sequence[ObservedPod]:
        """The pods that wait for a node."""
        return [pod for pod in self.pods if not pod.node and not pod.finished]

    def incomplete_since(self, job: Object | None) -> datetime | None:
        """Return since when some pods have nodes while other pods have none or do not exist; None otherwise."""
        if job is None or not any(pod.node and not pod.finished for pod in self.pods):
            return None
        if not self.absent and not self.unplaced:
            return None
        waiting = _unschedulable_since(self.unplaced)
        return min(waiting, default=time_of(job["metadata"].get("creationTimestamp")))

    @property
    def unschedulable_since(self) -> datetime | None:
        """Since when no node accepts one of the pods; None if each pod has a node."""
        return min(_unschedulable_since(self.pods), default=None)


def _unschedulable_since(pods: Sequence[ObservedPod]) -> list[datetime]:
    times = [pod.unschedulable_since for pod in pods]
    return [time for time in times if time]


def completions_of(job: Object) -> int:
    """Return how many pods a Job has."""
    return int((job.get("spec") or {}).get("completions") or 1)


def _rank(pod: ObservedPod) -> CauseRank:
    """Return how well the end of a pod explains the end of the attempt."""
    if pod.is_out_of_memory:
        return CauseRank.OUT_OF_MEMORY
    if pod.eviction or fault_of(pod):
        return CauseRank.EVICTED
    if pod.exit_code not in {
        None,
        ExitCode.DONE,
        ExitCode.INTERRUPTED,
        *SIGNAL_EXIT_CODES,
    }:
        return CauseRank.FAILED
    if pod.disruption:
        return CauseRank.DELETED
    if pod.exit_code in SIGNAL_EXIT_CODES:
        return CauseRank.KILLED
    return CauseRank.SUCCEEDED if pod.exit_code == ExitCode.DONE else CauseRank.STOPPED


def _ended_at(pod: ObservedPod) -> datetime:
    evicted = time_of(pod.condition("DisruptionTarget").get("lastTransitionTime"))
    return min(time for time in (evicted, pod.finished_at, EVER) if time)


def _message(pod: ObservedPod | None) -> TerminationMessage | None:
    return pod.termination_message if pod else None
