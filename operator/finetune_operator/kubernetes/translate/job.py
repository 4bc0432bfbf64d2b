"""A Job and its pod in our words: pure."""

from datetime import datetime

from finetune_operator.core.observation import JobState, ObservedJob
from finetune_operator.kubernetes.translate.diagnose import diagnose
from finetune_operator.kubernetes.translate.pod import Object, Pod, time_of
from finetune_trainer.contract import Progress


def observe_job(
    name: str,
    job: Object | None,
    pod: Pod | None,
    now: datetime,
    *,
    progress: Progress | None = None,
    warning: str = "",
) -> ObservedJob | None:
    """Give the attempt as it is; None where there is no Job and nobody knows how its process ended.

    A Job that is over says so in a condition, and only when no process is left. A Job that was deleted may have
    left its pod behind for a while: until that is over the attempt runs.
    """
    state, message = _state(job, pod), pod.termination_message if pod else None
    if state is None:
        return None
    return ObservedJob(
        name=name,
        state=state,
        started_at=pod.started_at if pod else None,
        finished_at=_finished_at(job, pod),
        exit_code=pod.exit_code if pod else None,
        disruption=_disruption(job, pod),
        out_of_memory=pod is not None and pod.terminated.get("reason") == "OOMKilled",
        message=message,
        progress=(message.progress if message else None) or progress,
        blocker=diagnose(pod, warning, now) if state in {JobState.WAITING, JobState.RUNNING} else None,
    )


def _state(job: Object | None, pod: Pod | None) -> JobState | None:
    if _has_condition(job, "Complete"):
        return JobState.COMPLETE
    if _has_condition(job, "Failed"):
        return JobState.FAILED
    if job is not None or (pod and not pod.finished):
        return JobState.RUNNING if pod and pod.started_at else JobState.WAITING
    if pod and pod.exit_code is not None:
        return JobState.COMPLETE if pod.exit_code == 0 else JobState.FAILED
    return JobState.FAILED if pod and pod.disruption else None


def is_finished(job: Object | None) -> bool:
    """Whether the Job itself says that no process of it is left."""
    return _has_condition(job, "Complete") or _has_condition(job, "Failed")


def _has_condition(job: Object | None, kind: str) -> bool:
    return _condition(job, kind).get("status") == "True"


def _condition(job: Object | None, kind: str) -> Object:
    conditions = (job.get("status") or {}).get("conditions") or [] if job else []
    return next((one for one in conditions if one["type"] == kind), {})


def _finished_at(job: Object | None, pod: Pod | None) -> datetime | None:
    ended = time_of(pod.terminated.get("finishedAt")) if pod else None
    over = (_condition(job, kind).get("lastTransitionTime") for kind in ("Complete", "Failed"))
    return ended or next((time for text in over if (time := time_of(text))), None)


def _disruption(job: Object | None, pod: Pod | None) -> str | None:
    """Look at the pod first, which says who it was; of a pod that nobody saw go, the Job still says that it was one."""
    if pod and (found := pod.disruption):
        return found
    failed = _condition(job, "Failed")
    said = str(failed.get("message") or "")
    return said if failed.get("reason") == "PodFailurePolicy" and "DisruptionTarget" in said else None
