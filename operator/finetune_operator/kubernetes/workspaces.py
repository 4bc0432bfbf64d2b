"""The claims that hold pipelines' work: each is there, and one pipeline at a time works on it."""

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
from finetune_operator.kubernetes.client import ApiError, KubernetesClient
from finetune_operator.kubernetes.resources import claim as volume
from finetune_operator.kubernetes.translate import api_errors as refusal
from finetune_operator.kubernetes.translate.api_errors import Blocked
from finetune_operator.kubernetes.translate.job import is_finished

Object = dict[str, Any]
Version = tuple[str, int]
"""The pipeline's uid and generation."""
WORKING = frozenset(kind.name for kind in STAGES if not kind.runs_server)
"""Stages whose attempts write to the workspace; a server does not."""


@dataclass
class _ClaimState:
    """How a claim stands to what one version of its pipeline asks for."""

    version: Version
    pending_changes: list[volume.Change]
    """Still to be made; none: it was seen to be as it is wanted, and is not read again."""
    immutable_differences: tuple[str, ...]
    """What it is not and cannot become."""
    rejection: dict[str, str] = field(default_factory=dict)
    """Field -> what the API server has against its change."""


class Workspaces:
    """The claims of pipelines."""

    def __init__(self, api: KubernetesClient, books: ResourceCache) -> None:
        self.api, self.cache = api, books
        self.states: dict[Key, _ClaimState] = {}
        self.locks: WeakValueDictionary[NamespacedName, asyncio.Lock] = WeakValueDictionary()

    async def observe(self, pipeline: Pipeline) -> Blocker | None:
        """Compare the claim with what is asked until they have been seen to agree; say what keeps them from it."""
        if pipeline.spec.workspace.existing_claim:
            self.forget(pipeline.key)
            return None
        known = self.states.get(pipeline.key)
        if known is None or known.version != _version(pipeline) or known.pending_changes:
            known = self.states[pipeline.key] = await self._compared(pipeline, known)
        words = "; ".join(
            [*(f"{name}: {said}" for name, said in known.rejection.items()), *known.immutable_differences]
        )
        return Blocker(Reason.VOLUME_NOT_READY, words) if words else None

    async def _compared(self, pipeline: Pipeline, before: _ClaimState | None) -> _ClaimState:
        found = await self.api.get(_where(pipeline))
        ours = found is not None and volume.ownership_error(pipeline, found) is None
        changes = volume.pending_changes(pipeline, found) if found and ours else []
        unlike = tuple(volume.immutable_differences(pipeline, found)) if found and ours else ()
        refused = before.rejection if before and before.version == _version(pipeline) else {}
        wanted = {change.field for change in changes}
        return _ClaimState(
            _version(pipeline), changes, unlike, {name: said for name, said in refused.items() if name in wanted}
        )

    async def apply_pending_changes(self, pipeline: Pipeline) -> None:
        """Change the claim to what is asked now; what is refused is told, and tried again by the next look."""
        known = self.states.get(pipeline.key)
        if known is None:
            return
        errors = {
            change.field: error for change in known.pending_changes if (error := await self._change(pipeline, change))
        }
        known.pending_changes = [change for change in known.pending_changes if change.field in errors]
        words = {
            name: refused.message for name, error in errors.items() if (refused := refusal.classify_api_error(error))
        }
        told = known.rejection
        known.rejection = {name: told.get(name, said) for name, said in words.items()}  # the first words, as elsewhere
        if busy := next((error for name, error in errors.items() if name not in words), None):
            raise busy
        if known.rejection != told:
            raise Conflict(f"something else is to be said of the workspace of {pipeline.key}")

    async def _change(self, pipeline: Pipeline, change: volume.Change) -> ApiError | None:
        try:
            await self.api.patch(_where(pipeline), change.patch)
        except ApiError as error:
            return error
        return None

    def check_retention(self, pipeline: Pipeline) -> None:
        """Raise ClusterError while the claim would go with the pipeline and was asked not to."""
        known = self.states.get(pipeline.key)
        left = {change.field for change in known.pending_changes} if known else set()
        if volume.WHEN_DELETED in left and pipeline.spec.workspace.when_deleted == "Retain":
            raise ClusterError(f"{pipeline.key} is not deleted before its workspace is one to be retained")

    def forget(self, key: Key) -> None:
        """Drop what was known of a pipeline's claim."""
        self.states.pop(key, None)

    @asynccontextmanager
    async def locked(self, pipeline: Pipeline) -> AsyncIterator[None]:
        """Have the claim to ourselves while a Job is made; raises Refusal where that is of no use.

        Two pipelines that look at the same moment would each see that the other has no Job yet.
        """
        turn = self.locks.setdefault((pipeline.key.namespace, volume.claim_name(pipeline)), asyncio.Lock())
        async with turn:
            await self._ensure(pipeline)
            yield

    async def _ensure(self, pipeline: Pipeline) -> None:
        name = volume.claim_name(pipeline)
        if holder := self._current_user(pipeline):
            raise Blocked(
                Reason.WORKSPACE_IN_USE,
                f"the claim {name} is the workspace of {holder.name}, which is not finished: wait, or use another",
            )
        found = await self.api.get(_where(pipeline))
        if found:
            if (known := self.states.get(pipeline.key)) and not known.pending_changes:
                self.forget(pipeline.key)  # it may have come since the look
            if words := volume.ownership_error(pipeline, found):
                raise Blocked(Reason.VOLUME_NOT_READY, words)
        elif pipeline.spec.workspace.existing_claim:
            raise Blocked(
                Reason.VOLUME_NOT_READY,
                f"workspace.existingClaim: there is no claim {name} in {pipeline.key.namespace}",
            )
        else:
            await self.api.create(paths.claims(pipeline.key.namespace), volume.build_claim(pipeline))

    def _current_user(self, pipeline: Pipeline) -> Key | None:
        """Name another pipeline that works on the same claim: whoever runs has it, else whoever is older."""
        mine, name = self.cache.pipelines.get(pipeline.key), volume.claim_name(pipeline)
        others = {
            key: other
            for key, other in self.cache.pipelines.items()
            if key.namespace == pipeline.key.namespace and key != pipeline.key and _claim_of(key, other) == name
        }
        runs = next((key for key, other in others.items() if self._is_running(key, other)), None)
        if runs or self._is_running(pipeline.key, mine or {}):
            return runs
        return next((key for key, other in others.items() if _takes_precedence(other, mine)), None)

    def _is_running(self, key: Key, found: Object) -> bool:
        """Whether it has an attempt whose Job was made: one that waits for its turn has a number, too."""
        jobs = {name: job for (_, name), job in self.cache.jobs.items() if owner_key(job) == key}
        over = {name for name, job in jobs.items() if is_finished(job)}
        return len(over) < len(jobs) or _has_live_job(found, over)


def _version(pipeline: Pipeline) -> Version:
    return pipeline.uid, pipeline.generation


def _where(pipeline: Pipeline) -> str:
    return paths.claims(pipeline.key.namespace, volume.claim_name(pipeline))


def _claim_of(key: Key, found: Object) -> str:
    wanted = (found.get("spec") or {}).get("workspace") or {}
    return wanted.get("existingClaim") or workspace_name(key.name)


def _has_live_job(found: Object, over: Collection[str]) -> bool:
    """Whether its status tells of a Job that was seen and, for all we know, has a pod: it may be deleted before that.

    A Job that is over has none left, also where nobody can bring the status up to date.
    """
    stages: Object = (found.get("status") or {}).get("stages") or {}
    last = (told["attempts"][-1] for name, told in stages.items() if name in WORKING and told.get("attempts"))
    running = (one for one in last if one.get("createdAt") and one.get("outcome") == Outcome.RUNNING)
    return any(one.get("job") not in over for one in running)


def _takes_precedence(other: Object, mine: Object | None) -> bool:
    """Whether the other is the older of two that have not finished."""
    if (other.get("status") or {}).get("finishedAt") or other["metadata"].get("deletionTimestamp"):
        return False
    return mine is None or _seniority(other) < _seniority(mine)


def _seniority(found: Object) -> tuple[str, str]:
    return str(found["metadata"].get("creationTimestamp")), str(found["metadata"]["uid"])
