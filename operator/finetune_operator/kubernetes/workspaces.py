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
from finetune_operator.core.observation import Waiting
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import Books, Place, pipeline_of
from finetune_operator.kubernetes.client import Api, ApiError
from finetune_operator.kubernetes.resources import claim as volume
from finetune_operator.kubernetes.translate import api_errors as refusal
from finetune_operator.kubernetes.translate.api_errors import Refusal
from finetune_operator.kubernetes.translate.job import is_over

Object = dict[str, Any]
Version = tuple[str, int]
"""The pipeline's uid and generation."""
WORKING = frozenset(kind.name for kind in STAGES if not kind.lasting)
"""Stages whose attempts write to the workspace; a server does not."""


@dataclass
class _Known:
    """How a claim stands to what one version of its pipeline asks for."""

    version: Version
    changes: list[volume.Change]
    """Still to be made; none: it was seen to be as it is wanted, and is not read again."""
    unlike: tuple[str, ...]
    """What it is not and cannot become."""
    refused: dict[str, str] = field(default_factory=dict)
    """Field -> what the API server has against its change."""


class Workspaces:
    """The claims of pipelines."""

    def __init__(self, api: Api, books: Books) -> None:
        self.api, self.books = api, books
        self.known: dict[Key, _Known] = {}
        self.turns: WeakValueDictionary[Place, asyncio.Lock] = WeakValueDictionary()

    async def look(self, pipeline: Pipeline) -> Waiting | None:
        """Compare the claim with what is asked until they have been seen to agree; say what keeps them from it."""
        if pipeline.spec.workspace.existing_claim:
            self.forget(pipeline.key)
            return None
        known = self.known.get(pipeline.key)
        if known is None or known.version != _version(pipeline) or known.changes:
            known = self.known[pipeline.key] = await self._compared(pipeline, known)
        words = "; ".join([*(f"{name}: {said}" for name, said in known.refused.items()), *known.unlike])
        return Waiting(Reason.VOLUME_NOT_READY, words) if words else None

    async def _compared(self, pipeline: Pipeline, before: _Known | None) -> _Known:
        found = await self.api.get(_where(pipeline))
        ours = found is not None and volume.mismatch(pipeline, found) is None
        changes = volume.changes(pipeline, found) if found and ours else []
        unlike = tuple(volume.unlike(pipeline, found)) if found and ours else ()
        refused = before.refused if before and before.version == _version(pipeline) else {}
        wanted = {change.field for change in changes}
        return _Known(
            _version(pipeline), changes, unlike, {name: said for name, said in refused.items() if name in wanted}
        )

    async def settle(self, pipeline: Pipeline) -> None:
        """Change the claim to what is asked now; what is refused is told, and tried again by the next look."""
        known = self.known.get(pipeline.key)
        if known is None:
            return
        errors = {change.field: error for change in known.changes if (error := await self._change(pipeline, change))}
        known.changes = [change for change in known.changes if change.field in errors]
        words = {name: refused.message for name, error in errors.items() if (refused := refusal.read(error))}
        told = known.refused
        known.refused = {name: told.get(name, said) for name, said in words.items()}  # the first words, as elsewhere
        if busy := next((error for name, error in errors.items() if name not in words), None):
            raise busy
        if known.refused != told:
            raise Conflict(f"something else is to be said of the workspace of {pipeline.key}")

    async def _change(self, pipeline: Pipeline, change: volume.Change) -> ApiError | None:
        try:
            await self.api.patch(_where(pipeline), change.patch)
        except ApiError as error:
            return error
        return None

    def check_kept(self, pipeline: Pipeline) -> None:
        """Raise ClusterError while the claim would go with the pipeline and was asked not to."""
        known = self.known.get(pipeline.key)
        left = {change.field for change in known.changes} if known else set()
        if volume.WHEN_DELETED in left and pipeline.spec.workspace.when_deleted == "Retain":
            raise ClusterError(f"{pipeline.key} is not deleted before its workspace is one to be retained")

    def forget(self, key: Key) -> None:
        """Drop what was known of a pipeline's claim."""
        self.known.pop(key, None)

    @asynccontextmanager
    async def had(self, pipeline: Pipeline) -> AsyncIterator[None]:
        """Have the claim to ourselves while a Job is made; raises Refusal where that is of no use.

        Two pipelines that look at the same moment would each see that the other has no Job yet.
        """
        turn = self.turns.setdefault((pipeline.key.namespace, volume.claim_name(pipeline)), asyncio.Lock())
        async with turn:
            await self._have(pipeline)
            yield

    async def _have(self, pipeline: Pipeline) -> None:
        name = volume.claim_name(pipeline)
        if holder := self._holder(pipeline):
            raise Refusal(
                Reason.WORKSPACE_IN_USE,
                f"the claim {name} is the workspace of {holder.name}, which is not finished: wait, or use another",
            )
        found = await self.api.get(_where(pipeline))
        if found:
            if (known := self.known.get(pipeline.key)) and not known.changes:
                self.forget(pipeline.key)  # it may have come since the look
            if words := volume.mismatch(pipeline, found):
                raise Refusal(Reason.VOLUME_NOT_READY, words)
        elif pipeline.spec.workspace.existing_claim:
            raise Refusal(
                Reason.VOLUME_NOT_READY,
                f"workspace.existingClaim: there is no claim {name} in {pipeline.key.namespace}",
            )
        else:
            await self.api.create(paths.claims(pipeline.key.namespace), volume.claim(pipeline))

    def _holder(self, pipeline: Pipeline) -> Key | None:
        """Name another pipeline that works on the same claim: whoever runs has it, else whoever is older."""
        mine, name = self.books.pipelines.get(pipeline.key), volume.claim_name(pipeline)
        others = {
            key: other
            for key, other in self.books.pipelines.items()
            if key.namespace == pipeline.key.namespace and key != pipeline.key and _claim_of(key, other) == name
        }
        runs = next((key for key, other in others.items() if self._runs(key, other)), None)
        if runs or self._runs(pipeline.key, mine or {}):
            return runs
        return next((key for key, other in others.items() if _goes_first(other, mine)), None)

    def _runs(self, key: Key, found: Object) -> bool:
        """Whether it has an attempt whose Job was made: one that waits for its turn has a number, too."""
        jobs = {name: job for (_, name), job in self.books.jobs.items() if pipeline_of(job) == key}
        over = {name for name, job in jobs.items() if is_over(job)}
        return len(over) < len(jobs) or _has_begun(found, over)


def _version(pipeline: Pipeline) -> Version:
    return pipeline.uid, pipeline.generation


def _where(pipeline: Pipeline) -> str:
    return paths.claims(pipeline.key.namespace, volume.claim_name(pipeline))


def _claim_of(key: Key, found: Object) -> str:
    wanted = (found.get("spec") or {}).get("workspace") or {}
    return wanted.get("existingClaim") or workspace_name(key.name)


def _has_begun(found: Object, over: Collection[str]) -> bool:
    """Whether its status tells of a Job that was seen and, for all we know, has a pod: it may be deleted before that.

    A Job that is over has none left, also where nobody can bring the status up to date.
    """
    stages: Object = (found.get("status") or {}).get("stages") or {}
    last = (told["attempts"][-1] for name, told in stages.items() if name in WORKING and told.get("attempts"))
    running = (one for one in last if one.get("createdAt") and one.get("outcome") == Outcome.RUNNING)
    return any(one.get("job") not in over for one in running)


def _goes_first(other: Object, mine: Object | None) -> bool:
    """Whether the other is the older of two that have not finished."""
    if (other.get("status") or {}).get("finishedAt") or other["metadata"].get("deletionTimestamp"):
        return False
    return mine is None or _seniority(other) < _seniority(mine)


def _seniority(found: Object) -> tuple[str, str]:
    return str(found["metadata"].get("creationTimestamp")), str(found["metadata"]["uid"])
