"""`finetune drill` on a cluster: evicts the pod of a stage, and watches the operator start the next attempt."""

import argparse
import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from finetune_cli.arguments import parse_timeout
from finetune_cli.cluster.api_errors import FORBIDDEN, scope_of
from finetune_cli.cluster.pods import pod_of
from finetune_cli.cluster.session import ClusterSession, connect, refresh, with_retries
from finetune_cli.drill.conduct import conclude, confirm, watch
from finetune_cli.drill.record import Drill, Look
from finetune_cli.drill.target import DrillTarget, Refused, choose_target
from finetune_cli.exit_codes import FAILED
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.pods.progress import metrics_port
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract import Progress

LEAST_GRACE = "SIGTERM and about 2 s, the least that a kubelet gives"
"""Time to save of a pod that is deleted with gracePeriodSeconds 0: its kubelet still sends SIGTERM first."""
DRY_RUN_UNSUPPORTED = re.compile("does not support dry run", re.IGNORECASE)
"""The API server's refusal if an admission webhook has side effects."""


def run(arguments: argparse.Namespace) -> int:
    """Evict the stage's pod, watch the pipeline and return the exit code."""
    timeout = parse_timeout(arguments.timeout)
    target, announcement = asyncio.run(_rehearse(arguments))
    if not confirm(announcement, yes=arguments.yes):
        return FAILED
    drill = Drill(target)
    return conclude(
        drill,
        lambda: asyncio.run(_evict_and_watch(drill, arguments, timeout)),
        arguments,
    )


async def _rehearse(arguments: argparse.Namespace) -> tuple[DrillTarget, str]:
    """Return what to evict and the text that announces it; raises Refused if the API server would refuse."""
    async with connect(arguments) as session:
        pipeline = await session.get_pipeline()
        target = choose_target(pipeline, arguments.stage, kill=arguments.without_grace)
        pod = await _running_pod(session, target.attempt)
        # The dry run comes before the question: the user confirms only what can happen.
        await _evict(session, pod, kill=target.kill, dry_run=True)
    grace = f"{pod.raw['spec'].get('terminationGracePeriodSeconds', 30)}s"
    if target.kill:
        grace = LEAST_GRACE
    return target, target.announce(f"the pod {pod.name} on {pod.node}", grace)


async def _running_pod(session: ClusterSession, attempt: AttemptStatus) -> ObservedPod:
    pod = await pod_of(session, attempt)
    state = "does not exist"
    if pod is not None:
        if pod.phase == "Running":
            return pod
        state = f"is {pod.phase}"
    raise Refused(
        f"the pod of attempt {attempt.number} {state}, so there is nothing to evict"
    )


async def _evict(
    session: ClusterSession, pod: ObservedPod, *, kill: bool, dry_run: bool = False
) -> None:
    """Evict or delete just this pod; raises Refused with the fix if the API server refuses."""
    try:
        if kill:
            await _delete(session, pod, dry_run=dry_run)
        else:
            await _create_eviction(session, pod, dry_run=dry_run)
    except ApiError as error:
        # Without a rehearsal the drill is still possible, so only the request itself decides.
        if dry_run and DRY_RUN_UNSUPPORTED.search(str(error)):
            return
        raise _refusal(error) or error from error


async def _delete(session: ClusterSession, pod: ObservedPod, *, dry_run: bool) -> None:
    options: dict[str, Any] = {"gracePeriodSeconds": 0}
    if dry_run:
        options["dryRun"] = ["All"]
    path = paths.pods(session.context.namespace, pod.name)
    await session.api.delete(path, options=options, uid=pod.uid)


async def _create_eviction(
    session: ClusterSession, pod: ObservedPod, *, dry_run: bool
) -> None:
    namespace = session.context.namespace
    query = {}
    if dry_run:
        query["dryRun"] = "All"
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": namespace},
        # By its UID: a later pod may have the same name.
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    }
    await session.api.create(paths.pod_eviction(namespace, pod.name), body, **query)


def _refusal(error: ApiError) -> Refused | None:
    """Return the error for a missing right or a PodDisruptionBudget; None for all others."""
    if error.status == HTTPStatus.FORBIDDEN:
        match = FORBIDDEN.search(str(error))
        if match:
            return Refused(_missing_right(*match.groups()))
    if error.status != HTTPStatus.TOO_MANY_REQUESTS:
        return None
    # An overloaded API server also answers 429, but with other causes.
    causes = error.details.get("causes") or []
    budgets = [
        str(cause.get("message"))
        for cause in causes
        if cause.get("reason") == "DisruptionBudget"
    ]
    if not budgets:
        return None
    advice = "a drain of its node would be refused, too; a drill with --kill does not ask the budget"
    return Refused(
        f"a PodDisruptionBudget forbids the eviction: {'; '.join(budgets)}; {advice}"
    )


def _missing_right(user: str, verb: str, resource: str, namespace: str | None) -> str:
    rule = f'- apiGroups: [""]\n  resources: [{resource}]\n  verbs: [{verb}]'
    fix = "a binding to the ClusterRole edit allows it, and so does a Role with this rule:"
    return f"{user} may not {verb} {resource} {scope_of(namespace)}; {fix}\n{rule}"


async def _evict_and_watch(
    drill: Drill, arguments: argparse.Namespace, timeout_seconds: float | None
) -> None:
    async with connect(arguments) as session:
        # Again, because the user may have taken minutes to confirm.
        pipeline = await session.get_pipeline()
        target = choose_target(pipeline, arguments.stage, kill=arguments.without_grace)
        if target.attempt.job != drill.target.attempt.job:
            raise Refused("another attempt runs by now; nothing was evicted")
        pod = await _running_pod(session, target.attempt)
        watcher = _Watcher(session, drill, pod)
        drill.step = target.attempt.last_step
        before = await watcher.progress(pod)
        if before:
            drill.step = before.step
        # Before the request: after a Ctrl-C in the middle of it, the eviction may stand.
        drill.evicted = True
        await _evict(session, pod, kill=target.kill)
        watcher.started = asyncio.get_running_loop().time()
        await watch(drill, watcher.look, timeout_seconds)


@dataclass
class _Watcher:
    """A reader of the pipeline, of the evicted pod, and of the Job and pod of the next attempt."""

    session: ClusterSession
    drill: Drill
    pod: ObservedPod
    """The evicted pod."""
    started: float = 0.0
    """Time of the eviction by the event loop's clock."""
    ended: bool = False
    has_next_job: bool = False
    may_use_proxy: bool = True

    async def look(self) -> Look:
        """Return what the cluster shows now."""
        loop = asyncio.get_running_loop()
        pipeline = await refresh(self.session)
        # Not for a kill: a pod that was deleted without grace is gone before its process is.
        if not self.drill.target.kill and not self.ended:
            self.ended = await with_retries(self._is_ended)
        progress = None
        after = self.drill.target.later_attempt(pipeline.status)
        if after:
            await self._look_for_job(after)
            if self.has_next_job:
                progress = await self._next_progress(pipeline, after)
        # The time comes last: the look may have taken as long as the API server is slow.
        seconds = loop.time() - self.started
        return Look(seconds, pipeline.status, self.ended, self.has_next_job, progress)

    async def _look_for_job(self, attempt: AttemptStatus) -> None:
        if self.has_next_job:
            return
        path = paths.jobs(self.session.context.namespace, attempt.job)
        self.has_next_job = (
            await with_retries(lambda: self.session.api.get(path)) is not None
        )

    async def _is_ended(self) -> bool:
        """Return whether no process of the evicted pod is left."""
        path = paths.pods(self.session.context.namespace, self.pod.name)
        current = await self.session.api.get(path)
        if current is None or current["metadata"]["uid"] != self.pod.uid:
            return True
        return bool(ObservedPod(current).terminated)

    async def _next_progress(
        self, pipeline: Pipeline, attempt: AttemptStatus
    ) -> Progress | None:
        """Return the progress from the pod itself, if the user may use the proxy; else what the operator read."""
        is_running = attempt.outcome is Outcome.RUNNING
        # After the first step, the operator's numbers are enough: they have the lost steps.
        if is_running and self.may_use_proxy and self.drill.next_step is None:
            pod = await with_retries(lambda: pod_of(self.session, attempt))
            if pod and pod.phase == "Running":
                progress = await self.progress(pod)
                if progress:
                    return progress
        stage = pipeline.status.stages[self.drill.target.stage]
        # The progress in the status may still be the evicted attempt's.
        if stage.last_attempt != attempt:
            return None
        return stage.progress

    async def progress(self, pod: ObservedPod) -> Progress | None:
        """Return a pod's progress through the API server's proxy; None if it cannot be read."""
        port = metrics_port(pod)
        if not port or not self.may_use_proxy:
            return None
        path = paths.pod_proxy(
            self.session.context.namespace, pod.name, port, "progress"
        )
        try:
            return Progress.model_validate(await self.session.api.get(path))
        except ApiError as error:
            # Other errors pass: the pod's server starts later than its process.
            self.may_use_proxy = error.status != HTTPStatus.FORBIDDEN
            return None
        except (ClusterError, ValidationError):
            return None
