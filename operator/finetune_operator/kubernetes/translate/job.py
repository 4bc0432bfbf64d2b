"""A Job and its pod as an ObservedJob: pure."""

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
    """Return the attempt as observed; None where the Job does not exist and how its process ended is unknown.

    A Job has a condition Complete or Failed only when none of its processes is left. The Job controller sets it a
    second or more after the pod has succeeded, so a succeeded pod with a result is believed at once (ADR 14).
    A deleted Job may leave its pod behind for a while: the attempt runs until that pod has finished.
    """
    state, message = _state(job, pod), pod.termination_message if pod else None
    if state is None:
        return None
    return ObservedJob(
        name=name,
        state=state,
        created_at=time_of(job["metadata"].get("creationTimestamp")) if job else None,
        started_at=pod.started_at if pod else None,
        finished_at=_finished_at(job, pod),
        exit_code=pod.exit_code if pod else None,
        disruption=_disruption(job, pod),
        out_of_memory=pod is not None and pod.terminated.get("reason") == "OOMKilled",
        memory_limit=pod.memory_limit if pod else "",
        stage=pod.stage if pod else "",
        message=message,
        # The termination message is newer than the progress that the pod was last polled for.
        progress=(message.progress if message else None) or progress,
        node=pod.node if pod else "",
        unschedulable_since=pod.unschedulable_since if pod else None,
        blocker=diagnose(pod, warning, now) if state in {JobState.WAITING, JobState.RUNNING} else None,
    )


def _state(job: Object | None, pod: Pod | None) -> JobState | None:
    if _has_condition(job, "Complete"):
        return JobState.COMPLETE
    if _has_condition(job, "Failed"):
        return JobState.FAILED
    if job is not None and pod and pod.has_result:
        return JobState.COMPLETE
    if job is not None or (pod and not pod.finished):
        return JobState.RUNNING if pod and pod.started_at else JobState.WAITING
    if pod and pod.exit_code is not None:
        return JobState.COMPLETE if pod.exit_code == 0 else JobState.FAILED
    return JobState.FAILED if pod and pod.disruption else None


def is_finished(job: Object | None) -> bool:
    """Return whether the Job's conditions show that none of its processes is left."""
    return _has_condition(job, "Complete") or _has_condition(job, "Failed")


def _has_condition(job: Object | None, kind: str) -> bool:
    return _condition(job, kind).get("status") == "True"


def _condition(job: Object | None, kind: str) -> Object:
    conditions = (job.get("status") or {}).get("conditions") or [] if job else []
    return next((one for one in conditions if one["type"] == kind), {})


def _finished_at(job: Object | None, pod: Pod | None) -> datetime | None:
    terminated_at = time_of(pod.terminated.get("finishedAt")) if pod else None
    transitions = (_condition(job, kind).get("lastTransitionTime") for kind in ("Complete", "Failed"))
    return terminated_at or next((time for text in transitions if (time := time_of(text))), None)


def _disruption(job: Object | None, pod: Pod | None) -> str | None:
    """Return the evidence of a disruption.

    The pod comes first because it names the cause. The Job's condition is still there when the pod was not observed.
    """
    if pod and (found := pod.disruption):
        return found
    failed = _condition(job, "Failed")
    message = str(failed.get("message") or "")
    return message if failed.get("reason") == "PodFailurePolicy" and "DisruptionTarget" in message else None
