"""The claims of workspaces: create and change them, and let one pipeline at a time write to each."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import Outcome
from finetune_operator.core.metadata import workspace_name
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import NamespacedName, ResourceCache, owner_key
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.resources import claim
from finetune_operator.kubernetes.translate.api_errors import ApiError, Blocked, classify_api_error
from finetune_operator.kubernetes.translate.job import is_finished

Object = dict[str, Any]
Version = tuple[str, int]
"""The pipeline's uid and generation."""
WRITING_STAGES = frozenset(kind.name for kind in STAGES if not kind.runs_server)
"""Stages whose attempts write to the workspace; a server does not."""


@dataclass
class _ClaimState:
    """The differences between a claim and what one version of its pipeline asks for."""

    version: Version
    pending_changes: list[claim.Change]
    """Changes still to be applied. Empty: the claim matched when it was read, and is not read again."""
    immutable_differences: tuple[str, ...]
    """Messages about differences that Kubernetes lets no client change."""
    rejection: dict[str, str] = field(default_factory=dict)
    """Field -> the message with which the API server rejected its change."""


class Workspaces:
    """The claims of pipelines."""

    def __init__(self, api: KubernetesClient, cache: ResourceCache) -> None:
        self.api, self.cache = api, cache
        self.states: dict[Key, _ClaimState] = {}
        self.locks: WeakValueDictionary[NamespacedName, asyncio.Lock] = WeakValueDictionary()

    async def observe(self, pipeline: Pipeline) -> Blocker | None:
        """Return why the claim differs from what the pipeline asks for; None where it does not.

        The claim is read until it has once matched this version of the pipeline.
        """
        if pipeline.spec.workspace.existing_claim:
            self.forget(pipeline.key)
            return None
        known = self.states.get(pipeline.key)
        if known is None or known.version != _version(pipeline) or known.pending_changes:
            known = self.states[pipeline.key] = await self._compare(pipeline, known)
        rejections = (f"{name}: {message}" for name, message in known.rejection.items())
        text = "; ".join([*rejections, *known.immutable_differences])
        return Blocker(Reason.VOLUME_NOT_READY, text) if text else None

    async def _compare(self, pipeline: Pipeline, before: _ClaimState | None) -> _ClaimState:
        found = await self.api.get(_claim_path(pipeline))
        is_own = found is not None and claim.ownership_error(pipeline, found) is None
        changes = claim.pending_changes(pipeline, found) if found and is_own else []
        differences = tuple(claim.immutable_differences(pipeline, found)) if found and is_own else ()
        rejected = before.rejection if before and before.version == _version(pipeline) else {}
        pending = {change.field for change in changes}
        rejection = {name: message for name, message in rejected.items() if name in pending}
        return _ClaimState(_version(pipeline), changes, differences, rejection)

    async def apply_pending_changes(self, pipeline: Pipeline) -> None:
        """Change the claim to what the pipeline asks for.

        A rejected change is recorded for the status, and tried again by the next reconcile. Raises Conflict where
        what is recorded has changed, so that the status is written anew.
        """
        known = self.states.get(pipeline.key)
        if known is None:
            return
        errors = {
            change.field: error for change in known.pending_changes if (error := await self._change(pipeline, change))
        }
        known.pending_changes = [change for change in known.pending_changes if change.field in errors]
        messages = {name: blocker.message for name, error in errors.items() if (blocker := classify_api_error(error))}
        before = known.rejection
        # The first message is kept: some policies word each rejection anew, which would change the status.
        known.rejection = {name: before.get(name, message) for name, message in messages.items()}
        if busy := next((error for name, error in errors.items() if name not in messages), None):
            raise busy
        if known.rejection != before:
            raise Conflict(f"the rejected changes of the workspace of {pipeline.key} have changed")

    async def _change(self, pipeline: Pipeline, change: claim.Change) -> ApiError | None:
        try:
            await self.api.patch(_claim_path(pipeline), change.patch)
        except ApiError as error:
            return error
        return None

    def check_retention(self, pipeline: Pipeline) -> None:
        """Raise ClusterError while the claim would be deleted with the pipeline although it is to be retained."""
        known = self.states.get(pipeline.key)
        pending = {change.field for change in known.pending_changes} if known else set()
        if claim.WHEN_DELETED in pending and pipeline.spec.workspace.when_deleted == "Retain":
            name = claim.claim_name(pipeline)
            raise ClusterError(
                f"{pipeline.key} is not deleted yet: its claim {name} would be deleted with it, not retained"
            )

    def forget(self, key: Key) -> None:
        """Drop the state of a pipeline's claim."""
        self.states.pop(key, None)

    @asynccontextmanager
    async def locked(self, pipeline: Pipeline) -> AsyncIterator[None]:
        """Lock the claim while a Job is created. Raises Blocked where the claim is unusable or in use.

        Without the lock, two pipelines that are reconciled at once would each find that the other has no Job yet.
        """
        lock = self.locks.setdefault((pipeline.key.namespace, claim.claim_name(pipeline)), asyncio.Lock())
        async with lock:
            await self._ensure(pipeline)
            yield

    async def _ensure(self, pipeline: Pipeline) -> None:
        name = claim.claim_name(pipeline)
        if user := self._current_user(pipeline):
            raise Blocked(
                Reason.WORKSPACE_IN_USE,
                f"the claim {name} is the workspace of the pipeline {user.name}, which has not finished: "
                "wait for it, or use another claim",
            )
        found = await self.api.get(_claim_path(pipeline))
        if found:
            if (known := self.states.get(pipeline.key)) and not known.pending_changes:
                self.forget(pipeline.key)  # the claim may have appeared since it was observed
            if message := claim.ownership_error(pipeline, found):
                raise Blocked(Reason.VOLUME_NOT_READY, message)
        elif pipeline.spec.workspace.existing_claim:
            raise Blocked(
                Reason.VOLUME_NOT_READY,
                f"workspace.existingClaim: the namespace {pipeline.key.namespace} has no claim {name}: create it, or "
                "correct the name",
            )
        else:
            await self.api.create(paths.claims(pipeline.key.namespace), claim.build_claim(pipeline))

    def _current_user(self, pipeline: Pipeline) -> Key | None:
        """Return another pipeline that uses the same claim: one that runs, else an older unfinished one."""
        own, name = self.cache.pipelines.get(pipeline.key), claim.claim_name(pipeline)
        others = {
            key: other
            for key, other in self.cache.pipelines.items()
            if key.namespace == pipeline.key.namespace and key != pipeline.key and _claim_of(key, other) == name
        }
        running = next((key for key, other in others.items() if self._is_running(key, other)), None)
        if running or self._is_running(pipeline.key, own or {}):
            return running
        return next((key for key, other in others.items() if _takes_precedence(other, own)), None)

    def _is_running(self, key: Key, found: Object) -> bool:
        """Return whether the pipeline has a live Job: an attempt that waits for the claim has a number, but no Job."""
        jobs = {name: job for (_, name), job in self.cache.jobs.items() if owner_key(job) == key}
        finished = {name for name, job in jobs.items() if is_finished(job)}
        return len(finished) < len(jobs) or _has_live_job(found, finished)


def _version(pipeline: Pipeline) -> Version:
    return pipeline.uid, pipeline.generation


def _claim_path(pipeline: Pipeline) -> str:
    return paths.claims(pipeline.key.namespace, claim.claim_name(pipeline))


def _claim_of(key: Key, found: Object) -> str:
    workspace = (found.get("spec") or {}).get("workspace") or {}
    return workspace.get("existingClaim") or workspace_name(key.name)


def _has_live_job(found: Object, finished: Collection[str]) -> bool:
    """Return whether the pipeline's status has an attempt whose Job was created and may still have a pod.

    A deleted Job may leave its pod behind. A Job in `finished` has no pod left, even where the status is out of date.
    """
    stages: Object = (found.get("status") or {}).get("stages") or {}
    last = (stage["attempts"][-1] for name, stage in stages.items() if name in WRITING_STAGES and stage.get("attempts"))
    running = (attempt for attempt in last if attempt.get("createdAt") and attempt.get("outcome") == Outcome.RUNNING)
    return any(attempt.get("job") not in finished for attempt in running)


def _takes_precedence(other: Object, own: Object | None) -> bool:
    """Return whether the other pipeline has not finished and is older than this one."""
    if (other.get("status") or {}).get("finishedAt") or other["metadata"].get("deletionTimestamp"):
        return False
    return own is None or _seniority(other) < _seniority(own)


def _seniority(found: Object) -> tuple[str, str]:
    return str(found["metadata"].get("creationTimestamp")), str(found["metadata"]["uid"])
