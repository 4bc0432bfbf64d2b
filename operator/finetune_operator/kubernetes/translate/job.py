"""A Job and its pods as an ObservedJob: pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from finetune_operator.core.observation import Blocker, JobState, ObservedJob
from finetune_operator.kubernetes.translate.attempt_pods import AttemptPods
from finetune_operator.kubernetes.translate.diagnose import (
    first_lost_since,
    held_deletion,
    without_pods,
    worst_blocker,
)
from finetune_operator.kubernetes.translate.faults import deadline_of
from finetune_operator.kubernetes.translate.object import Object, condition_of
from finetune_operator.kubernetes.translate.pod import ObservedPod, time_of
from finetune_operator.kubernetes.translate.suspension import Suspension
from finetune_trainer.contract import Progress

NO_WARNINGS: Mapping[str, str] = MappingProxyType({})


def observe_job(
    name: str,
    job: Object | None,
    pods: Sequence[ObservedPod],
    now: datetime,
    *,
    progress: Progress | None = None,
    warnings: Mapping[str, str] = NO_WARNINGS,
) -> ObservedJob | None:
    """Return the attempt as observed; None if the Job does not exist and the end of its process is unknown.

    A Job has a condition Complete or Failed only when none of its processes is left. The Job controller sets it a
    second or more after the pods have succeeded, so a succeeded first pod with a result is believed once all others
    have ended (ADR 14). A deleted Job may leave its pods behind for a while: the attempt runs until they have finished.

    `warnings` has the newest Warning event by the name of the Job or a pod.
    """
    suspension = Suspension(None if is_finished(job) else job, pods)
    all_pods = AttemptPods.of(job, suspension.present_pods)
    state = JobState.WAITING if suspension.lasts else _state(job, all_pods)
    if state is None:
        return None
    is_over = state in {JobState.COMPLETE, JobState.FAILED}
    pod = _deciding_pod(state, all_pods)
    message = all_pods.message_of(pod)
    reported = message.progress if message else None
    worst = worst_blocker(name, all_pods, warnings, now)
    blocker = _blocker(job, suspension, all_pods, worst, now)
    return ObservedJob(
        name=name,
        state=state,
        created_at=time_of(job["metadata"].get("creationTimestamp")) if job else None,
        started_at=all_pods.started_at(is_over=is_over),
        finished_at=all_pods.finished_at or _finished_at(job),
        exit_code=pod.exit_code if pod else None,
        disruption=_disruption(job, pod),
        out_of_memory=pod is not None and pod.is_out_of_memory,
        memory_limit=pod.memory_limit if pod else "",
        stage=pod.stage if pod else "",
        message=message,
        # The termination message is newer than the progress that the pod was last polled for.
        progress=reported or progress,
        node=all_pods.first.node if all_pods.first else "",
        pod=_failed_pod(state, all_pods),
        unschedulable_since=all_pods.unschedulable_since,
        incomplete_since=all_pods.incomplete_since(job),
        fault=all_pods.fault or deadline_of(job),
        outlived_since=all_pods.outlived_since,
        sidecar=all_pods.sidecar,
        failed_node=_failed_node(state, pod),
        lost_since=first_lost_since(all_pods.pods, now),
        suspended_since=suspension.since,
        resumed_at=suspension.resumed_at,
        blocker=None if is_over else blocker,
    )


def _blocker(
    job: Object | None,
    suspension: Suspension,
    pods: AttemptPods,
    worst: Blocker | None,
    now: datetime,
) -> Blocker | None:
    """Return the blocker of the Job itself, or the worst blocker of its pods."""
    if job is None:
        return worst
    return (
        held_deletion(job, pods, now)
        or suspension.blocker
        or worst
        or without_pods(job, pods, suspension.resumed_at, now)
    )


def _failed_node(state: JobState, pod: ObservedPod | None) -> str:
    if pod is None or state is not JobState.FAILED:
        return ""
    return pod.node


def _deciding_pod(state: JobState, pods: AttemptPods) -> ObservedPod | None:
    """Return the pod that decides how the attempt is reported."""
    # Only the first pod has a result. In a failed attempt, one pod has failed and the others end because of it.
    if state is JobState.COMPLETE:
        return pods.first
    return pods.ended_by or pods.first


def _failed_pod(state: JobState, pods: AttemptPods) -> str:
    """Return the name of the pod that has failed the attempt; empty for another state."""
    return pods.culprit if state is JobState.FAILED else ""


def _state(job: Object | None, pods: AttemptPods) -> JobState | None:
    if _has_condition(job, "Complete"):
        return JobState.COMPLETE
    if job is not None and pods.has_result and (pods.has_ended or is_finished(job)):
        return JobState.COMPLETE
    if _has_condition(job, "Failed"):
        return JobState.FAILED
    if job is not None or pods.live:
        return JobState.RUNNING if pods.started_at(is_over=False) else JobState.WAITING
    # The Job was deleted: only its pods show how it ended.
    if pods.ended_by is None:
        return None
    # With a result of the first pod, the others end because of it.
    is_complete = pods.has_result or pods.ended_by.exit_code == 0
    return JobState.COMPLETE if is_complete else JobState.FAILED


def is_finished(job: Object | None) -> bool:
    """Return whether the Job's conditions show that none of its processes is left."""
    return _has_condition(job, "Complete") or _has_condition(job, "Failed")


def _has_condition(job: Object | None, kind: str) -> bool:
    return condition_of(job, kind).get("status") == "True"


def _finished_at(job: Object | None) -> datetime | None:
    for kind in ("Complete", "Failed"):
        time = time_of(condition_of(job, kind).get("lastTransitionTime"))
        if time:
            return time
    return None


def _disruption(job: Object | None, pod: ObservedPod | None) -> str | None:
    """Return the evidence of a disruption.

    The pod comes first because it names the cause. The Job's condition is still there when the pod was not observed.
    """
    if pod and pod.disruption:
        return pod.disruption
    failed = condition_of(job, "Failed")
    message = str(failed.get("message") or "")
    if failed.get("reason") == "PodFailurePolicy" and "DisruptionTarget" in message:
        return message
    return None
