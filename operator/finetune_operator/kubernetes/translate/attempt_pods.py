"""The pods of one attempt as one process: when it started, what ended it, and what it left: pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from finetune_operator.core.endings import SIGNAL_EXIT_CODES
from finetune_operator.kubernetes.translate.pod import Pod, time_of
from finetune_trainer.contract import ExitCode, TerminationMessage

Object = dict[str, Any]
EVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class AttemptPods:
    """The pods of one attempt that are known: one of each index, in their order."""

    pods: Sequence[Pod]
    count: int
    """How many pods the attempt has."""

    @classmethod
    def of(cls, job: Object | None, pods: Sequence[Pod]) -> "AttemptPods":
        """Return the pods of a Job; without the Job there are as many as their indexes say."""
        return cls(
            pods, completions_of(job) if job else max((pod.index + 1 for pod in pods), default=1)
        )

    @property
    def first(self) -> Pod | None:
        """The pod with index 0, which alone writes and has the result."""
        return next((pod for pod in self.pods if pod.index == 0), None)

    @property
    def absent(self) -> int:
        """How many pods are not known: not created yet, or gone without a trace."""
        return max(0, self.count - len(self.pods))

    @property
    def live(self) -> bool:
        """Whether a process of a known pod may still run."""
        return any(not pod.finished for pod in self.pods)

    def started_at(self, *, is_over: bool) -> datetime | None:
        """Return when the last process started; None while one has not. Pods of an attempt that is over may be gone."""
        started = [pod.started_at for pod in self.pods]
        known = [time for time in started if time]
        return (
            max(known)
            if known and len(known) == len(started) and (is_over or not self.absent)
            else None
        )

    @property
    def finished_at(self) -> datetime | None:
        """When the last process ended; None where no end is known."""
        return max((time for pod in self.pods if (time := pod.finished_at)), default=None)

    @property
    def has_result(self) -> bool:
        """Whether the first pod has succeeded with a result."""
        return bool(self.first and self.first.has_result)

    @property
    def has_ended(self) -> bool:
        """Whether no process of any pod is left."""
        return not self.absent and not self.live

    @cached_property
    def ended_by(self) -> Pod | None:
        """The pod whose end is that of the attempt, as the others end because of it; None while none has ended.

        Certain evidence comes first, then a fault of a pod's own. The Job controller deletes the other pods after the
        first has failed, so a deletion alone explains nothing that a failure can explain. 75 says that a process was
        stopped, or that another one has gone.
        """
        ended = [pod for pod in self.pods if pod.exit_code is not None or pod.disruption]
        return min(ended, key=lambda pod: (_rank(pod), _ended_at(pod), pod.index), default=None)

    @property
    def culprit(self) -> str:
        """The name of that pod for people; empty for the only pod, and where all were stopped."""
        pod = self.ended_by
        return f"pod {pod.index}" if pod and self.count > 1 and _rank(pod) < STOPPED else ""

    def message_of(self, pod: Pod | None) -> TerminationMessage | None:
        """Return the termination message of the pod that ended the attempt, with what the first pod has saved."""
        mine, first = _message(pod), _message(self.first)
        if pod is self.first or first is None:
            return mine
        failure = mine.failure if mine else None
        return TerminationMessage(
            failure=failure, interruption=first.interruption, progress=first.progress
        )

    @property
    def unplaced(self) -> Sequence[Pod]:
        """The pods that wait for a node."""
        return [pod for pod in self.pods if not pod.node and not pod.finished]

    def incomplete_since(self, job: Object | None) -> datetime | None:
        """Return since when some pods have nodes while others have none, or are not even created; None otherwise."""
        if job is None or not any(pod.node and not pod.finished for pod in self.pods):
            return None
        if not self.absent and not self.unplaced:
            return None
        waiting = [time for pod in self.unplaced if (time := pod.unschedulable_since)]
        return min(waiting, default=time_of(job["metadata"].get("creationTimestamp")))

    @property
    def unschedulable_since(self) -> datetime | None:
        """Since when no node accepts one of the pods; None where each has one."""
        return min(self._unschedulable(), default=None)

    def _unschedulable(self) -> Iterator[datetime]:
        return (time for pod in self.pods if (time := pod.unschedulable_since))


def completions_of(job: Object) -> int:
    """Return how many pods a Job has."""
    return int((job.get("spec") or {}).get("completions") or 1)


STOPPED = 5
"""The rank of a pod that was stopped and gives no other reason."""


def _rank(pod: Pod) -> int:
    """Return how well the end of a pod explains the end of all: the lowest is the cause."""
    if pod.is_out_of_memory:
        return 0
    if pod.eviction:
        return 1
    if pod.exit_code not in {None, ExitCode.DONE, ExitCode.INTERRUPTED, *SIGNAL_EXIT_CODES}:
        return 2
    if pod.disruption:
        return 4
    return 3 if pod.exit_code in SIGNAL_EXIT_CODES else STOPPED + (pod.exit_code == ExitCode.DONE)


def _ended_at(pod: Pod) -> datetime:
    evicted = time_of(pod.condition("DisruptionTarget").get("lastTransitionTime"))
    return min(time for time in (evicted, pod.finished_at, EVER) if time)


def _message(pod: Pod | None) -> TerminationMessage | None:
    return pod.termination_message if pod else None
