"""`finetune drill` on a cluster: evicts the pod of a stage, and watches the operator start the next attempt."""

import argparse
import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from finetune_cli.arguments import parse_timeout
from finetune_cli.cluster.api_errors import FORBIDDEN
from finetune_cli.cluster.pods import pod_of
from finetune_cli.cluster.session import ClusterSession, connect, refresh, with_retries
from finetune_cli.drill.conduct import conclude, confirm, watch
from finetune_cli.drill.record import Drill, Look
from finetune_cli.drill.target import Refused, Target, choose_target
from finetune_cli.exit_codes import FAILED
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.pods.progress import metrics_port
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_trainer.contract import Progress

LEAST_GRACE = "SIGTERM and about 2 s, the least that a kubelet gives"
"""Time to save of a pod that is deleted with gracePeriodSeconds 0: its kubelet still sends SIGTERM first."""
DRY_RUN_UNSUPPORTED = re.compile("does not support dry run", re.IGNORECASE)
"""The API server's refusal where an admission webhook has side effects."""


def run(arguments: argparse.Namespace) -> int:
    """Evict the stage's pod, watch the pipeline and return the exit code."""
    timeout = parse_timeout(arguments.timeout)
    target, announcement = asyncio.run(_rehearse(arguments))
    if not confirm(announcement, yes=arguments.yes):
        return FAILED
    drill = Drill(target)
    return conclude(
        drill, lambda: asyncio.run(_evict_and_watch(drill, arguments, timeout)), arguments
    )


async def _rehearse(arguments: argparse.Namespace) -> tuple[Target, str]:
    """Return what to evict and the text that announces it; raises Refused where the API server would refuse."""
    async with connect(arguments) as session:
        target = choose_target(
            await session.get_pipeline(), arguments.stage, kill=arguments.without_grace
        )
        pod = await _running_pod(session, target.attempt)
        await _evict(session, pod, kill=target.kill, dry_run=True)
    grace = f"{pod.raw['spec'].get('terminationGracePeriodSeconds', 30)}s"
    return target, target.announce(
        f"the pod {pod.name} on {pod.node}", LEAST_GRACE if target.kill else grace
    )


async def _running_pod(session: ClusterSession, attempt: AttemptStatus) -> Pod:
    pod = await pod_of(session, attempt)
    if pod is None or pod.phase != "Running":
        found = f"is {pod.phase}" if pod else "does not exist"
        raise Refused(f"the pod of attempt {attempt.number} {found}, so there is nothing to evict")
    return pod


async def _evict(session: ClusterSession, pod: Pod, *, kill: bool, dry_run: bool = False) -> None:
    """Evict or delete just this pod; raises Refused with the fix where the API server refuses."""
    namespace = session.context.namespace
    query = {"dryRun": "All"} if dry_run else {}
    try:
        if kill:
            options: dict[str, Any] = {"gracePeriodSeconds": 0} | (
                {"dryRun": ["All"]} if dry_run else {}
            )
            await session.api.delete(paths.pods(namespace, pod.name), options=options, uid=pod.uid)
        else:
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": pod.name, "namespace": namespace},
                "deleteOptions": {"preconditions": {"uid": pod.uid}},
            }
            await session.api.create(paths.pod_eviction(namespace, pod.name), body, **query)
    except ApiError as error:
        if dry_run and DRY_RUN_UNSUPPORTED.search(str(error)):
            return
        raise _refusal(error) or error from error


def _refusal(error: ApiError) -> Refused | None:
    """Return the error for a missing right or a PodDisruptionBudget; None for all others."""
    found = FORBIDDEN.search(str(error)) if error.status == HTTPStatus.FORBIDDEN else None
    if found:
        return Refused(_missing_right(*found.groups()))
    causes = error.details.get("causes") or []
    budgets = [str(one.get("message")) for one in causes if one.get("reason") == "DisruptionBudget"]
    if error.status == HTTPStatus.TOO_MANY_REQUESTS and budgets:
        advice = (
            "a drain of its node would be refused, too; a drill with --kill does not ask the budget"
        )
        return Refused(
            f"a PodDisruptionBudget forbids the eviction: {'; '.join(budgets)}; {advice}"
        )
    return None


def _missing_right(user: str, verb: str, resource: str, namespace: str | None) -> str:
    where = f"in the namespace {namespace}" if namespace else "in all namespaces"
    rule = f'- apiGroups: [""]\n  resources: [{resource}]\n  verbs: [{verb}]'
    fix = "a binding to the ClusterRole edit allows it, and so does a Role with this rule:"
    return f"{user} may not {verb} {resource} {where}; {fix}\n{rule}"


async def _evict_and_watch(
    drill: Drill, arguments: argparse.Namespace, timeout_seconds: float | None
) -> None:
    async with connect(arguments) as session:
        target = choose_target(
            await session.get_pipeline(), arguments.stage, kill=arguments.without_grace
        )
        if target.attempt.job != drill.target.attempt.job:
            raise Refused("another attempt runs by now; nothing was evicted")
        pod = await _running_pod(session, target.attempt)
        watcher = _Watcher(session, drill, pod)
        before = await watcher.progress(pod)
        drill.step = before.step if before else target.attempt.last_step
        drill.evicted = (
            True  # before the request: after a Ctrl-C in the middle of it, the eviction may stand
        )
        await _evict(session, pod, kill=target.kill)
        watcher.started = asyncio.get_running_loop().time()
        await watch(drill, watcher.look, timeout_seconds)


@dataclass
class _Watcher:
    """Looks at the pipeline, at the evicted pod, and at the Job and pod of the next attempt."""

    session: ClusterSession
    drill: Drill
    pod: Pod
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
        if (
            not self.drill.target.kill
        ):  # a pod that was deleted without grace is gone before its process is
            self.ended = self.ended or await with_retries(self._is_ended)
        after = _attempt_after(pipeline, self.drill.target)
        if after and not self.has_next_job:
            path = paths.jobs(self.session.context.namespace, after.job)
            self.has_next_job = await with_retries(lambda: self.session.api.get(path)) is not None
        progress = (
            await self._next_progress(pipeline, after) if after and self.has_next_job else None
        )
        return Look(
            loop.time() - self.started, pipeline.status, self.ended, self.has_next_job, progress
        )

    async def _is_ended(self) -> bool:
        """Whether no process of the evicted pod is left."""
        found = await self.session.api.get(
            paths.pods(self.session.context.namespace, self.pod.name)
        )
        return (
            found is None or found["metadata"]["uid"] != self.pod.uid or bool(Pod(found).terminated)
        )

    async def _next_progress(self, pipeline: Pipeline, attempt: AttemptStatus) -> Progress | None:
        """Return the progress from the pod itself, where the user may use the proxy; else what the operator read."""
        if (
            attempt.outcome is Outcome.RUNNING
            and self.may_use_proxy
            and self.drill.next_step is None
        ):
            pod = await with_retries(lambda: pod_of(self.session, attempt))
            if pod and pod.phase == "Running" and (found := await self.progress(pod)):
                return found
        stage = pipeline.status.stages[self.drill.target.stage]
        return stage.progress if stage.last_attempt == attempt else None

    async def progress(self, pod: Pod) -> Progress | None:
        """Return a pod's progress through the API server's proxy; None where it cannot be read."""
        port = metrics_port(pod)
        if not (port and self.may_use_proxy):
            return None
        path = paths.pod_proxy(self.session.context.namespace, pod.name, port, "progress")
        try:
            return Progress.model_validate(await self.session.api.get(path))
        except ApiError as error:
            self.may_use_proxy = error.status != HTTPStatus.FORBIDDEN
            return None
        except (ClusterError, ValidationError):
            return None


def _attempt_after(pipeline: Pipeline, target: Target) -> AttemptStatus | None:
    stage = pipeline.status.stages.get(target.stage)
    newest = stage.last_attempt if stage else None
    return newest if newest and newest.number > target.attempt.number else None
