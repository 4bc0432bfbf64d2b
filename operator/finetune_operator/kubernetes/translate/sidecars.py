"""The other containers of a stage's pod, which admission policies inject: whether they hold it up, or fail: pure."""

from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.core.metadata import STAGE_CONTAINER
from finetune_operator.core.observation import Blocker
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import (
    ObservedPod,
    terminations,
    time_of,
)

# A proxy may restart until its control plane answers.
MAX_RESTARTS = 3
"""Number of restarts after a failure from which a container counts as failed."""
RECOVERED_AFTER = timedelta(minutes=1)
"""Time that a container which failed MAX_RESTARTS times must run to count as recovered: each restart runs a moment."""
LATE_AFTER = timedelta(minutes=5)
"""Time after which an init container that has not ended, or not started as a sidecar, needs a person."""
OPT_OUT = 'the label sidecar.istio.io/inject: "false" or the like'


def sidecar_blocker(pod: ObservedPod, now: datetime | None = None) -> Blocker | None:
    """Return what a container besides the stage's does to the attempt; None for a pod that has ended.

    Without a time, no container starts late.
    """
    if pod.finished or pod.deleted_at:
        return None
    if pod.exit_code is not None:
        return _outlives(pod)
    failed = _first_failed(pod, now)
    if failed:
        effect = "the process goes on" if pod.started_at else "the process cannot start"
        fix = f"run `kubectl logs {pod.name} -c {failed['name']}`, or keep it out of the pod with {OPT_OUT}"
        return Blocker(
            Reason.SIDECAR_FAILED, f"{describe_failure(failed)}, so {effect}: {fix}"
        )
    return _starts_late(pod, now)


def failed_sidecar(pod: ObservedPod) -> str:
    """Return which container besides the stage's has failed; empty if none has."""
    failed = _first_failed(pod)
    if not failed:
        return ""
    return f"{describe_failure(failed)}, which may be the cause"


def describe_failure(status: Object) -> str:
    """Return how a container failed, from its status: its exit code, and its reason or message."""
    kind = "container"
    if status.get("isInit"):
        kind = "init container"
    for terminated in terminations(status):
        if terminated.get("exitCode"):
            text = f"{kind} {status['name']} failed (exit code {terminated['exitCode']}"
            reason = str(terminated.get("reason") or "")
            detail = reason if reason not in {"", "Error"} else ""
            text += f", {detail})" if detail else ")"
            message = str(terminated.get("message") or "").strip()[-1000:]
            return f"{text}: {message}" if message else text
    return f"{kind} {status['name']} failed"


def _outlives(pod: ObservedPod) -> Blocker | None:
    names = [status["name"] for status in other_containers(pod) if not _ended(status)]
    if not names:
        # The kubelet is about to report the end of the pod.
        return None
    return Blocker(
        Reason.SIDECAR_RUNNING,
        f"the process has ended with exit code {pod.exit_code}, and the container {', '.join(names)} of pod {pod.name} "
        f"has not: the Job is stopped 30 s after the end. Keep the container out of the pod with {OPT_OUT}",
    )


def _starts_late(pod: ObservedPod, now: datetime | None) -> Blocker | None:
    """Return the init container that the process waits for."""
    if pod.started_at:
        return None
    for status in pod.init_statuses:
        running = (status.get("state") or {}).get("running")
        if running and not status.get("started"):
            message = f"waits for the init container {status['name']}"
            since = time_of(running.get("startedAt"))
            if now is None or since is None or now < since + LATE_AFTER:
                return Blocker(Reason.PROGRESSING, message)
            fix = f"run `kubectl logs {pod.name} -c {status['name']}`"
            return Blocker(Reason.CONTAINER_NOT_STARTED, f"{message}: {fix}")
    return None


def _first_failed(pod: ObservedPod, now: datetime | None = None) -> Object | None:
    for status in other_containers(pod):
        if _has_failed(status, now):
            return status
    return None


def _has_failed(status: Object, now: datetime | None) -> bool:
    """Return whether a container has failed, and has not recovered since.

    The answer stays the same while the container fails, waits and runs for a moment, again and again.
    """
    state = status.get("state") or {}
    failures = [end for end in terminations(status) if end.get("exitCode")]
    if not failures:
        return False
    running = state.get("running")
    if not running:
        waits = (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff"
        return waits or bool((state.get("terminated") or {}).get("exitCode"))
    # A native sidecar runs before it has started.
    if status.get("isInit") and not status.get("started"):
        return True
    restarts = int(status.get("restartCount") or 0)
    since = time_of(running.get("startedAt"))
    if restarts < MAX_RESTARTS or now is None or since is None:
        return False
    return now < since + RECOVERED_AFTER


def _ended(status: Object) -> bool:
    return bool((status.get("state") or {}).get("terminated"))


def other_containers(pod: ObservedPod) -> list[Object]:
    """Return the statuses of the init containers and of the containers besides the stage's."""
    init = [{**status, "isInit": True} for status in pod.init_statuses]
    others = [
        status for status in pod.container_statuses if status["name"] != STAGE_CONTAINER
    ]
    return [*init, *others]
