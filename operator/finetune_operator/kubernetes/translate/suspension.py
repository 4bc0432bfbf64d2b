"""A Job that a queue or a person has suspended: which of its pods that has ended, and since when. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.kubernetes.translate.object import Object, condition_of
from finetune_operator.kubernetes.translate.pod import ObservedPod, time_of

# The Job controller sets it for each suspension, and sets it to False when the Job is resumed.
CONDITION = "Suspended"


@dataclass(frozen=True)
class Suspension:
    """The suspension of a Job that has not finished, with all of its known pods."""

    job: Object | None
    """None: there is no Job, or it has finished."""
    pods: Sequence[ObservedPod]

    @property
    def lasts(self) -> bool:
        """Whether the Job is suspended and no process of it is left."""
        return self._is_requested and not self.later_pods

    @property
    def later_pods(self) -> Sequence[ObservedPod]:
        """The pods that no suspension has ended."""
        return [pod for pod in self.pods if not self._has_ended(pod)]

    @property
    def present_pods(self) -> Sequence[ObservedPod]:
        """The pods that show how the Job is now: the processes before the last suspension do not."""
        return self.pods if self.lasts else self.later_pods

    @property
    def since(self) -> datetime | None:
        """When its last process ended, or else when the Job controller saw the suspension; None if it does not last."""
        if self.job is None or not self.lasts:
            return None
        ends = [pod.finished_at or pod.deleted_at for pod in self.pods]
        known = [end for end in ends if end]
        created = time_of(self.job["metadata"].get("creationTimestamp"))
        return max(known, default=time_of(self._changed_at) or created)

    @property
    def resumed_at(self) -> datetime | None:
        """When the last suspension ended; None if the Job is suspended, or never was."""
        if self._is_requested or self._condition.get("status") != "False":
            return None
        return time_of(self._changed_at)

    @property
    def blocker(self) -> Blocker | None:
        """Why no process runs, with the fix; None if the suspension does not last."""
        if self.job is None or not self.lasts:
            return None
        name = self.job["metadata"]["name"]
        message = (
            f"the Job {name} is suspended, for example by a queue:"
            " it starts when the queue admits it, or when its spec.suspend is false"
        )
        return Blocker(Reason.WAITING_FOR_QUOTA, message)

    def _has_ended(self, pod: ObservedPod) -> bool:
        """Return whether the suspension has ended this pod: the Job controller has deleted it."""
        if not (pod.gone or (pod.finished and pod.deleted_at)) or pod.has_result:
            return False
        if self._is_requested or self._condition.get("status") == "True":
            return True
        resumed = self.resumed_at
        created = pod.created_at
        return resumed is not None and created is not None and created < resumed

    @property
    def _is_requested(self) -> bool:
        return bool(((self.job or {}).get("spec") or {}).get("suspend"))

    @property
    def _condition(self) -> Object:
        return condition_of(self.job, CONDITION)

    @property
    def _changed_at(self) -> object:
        return self._condition.get("lastTransitionTime")
