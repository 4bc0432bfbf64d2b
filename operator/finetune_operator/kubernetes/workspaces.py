"""The claims of workspaces: how they are, who uses them, and the requests that create and change them."""

from dataclasses import replace
from typing import Any

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker, ClaimChange, ClaimUser, ObservedWorkspace
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import CLAIMS, ResourceCache, owner_key
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.resources import claim
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, Blocked

Object = dict[str, Any]


class Workspaces:
    """The claims of pipelines."""

    def __init__(self, api: KubernetesClient, cache: ResourceCache) -> None:
        self.api, self.cache = api, cache

    async def observe(self, pipeline: Pipeline) -> ObservedWorkspace:
        """Return the claim as it is, and the other pipelines that use it."""
        known = self.cache.pipelines.get((pipeline.key.namespace, pipeline.key.name))
        found = await self._find(pipeline)
        workspace = ObservedWorkspace(
            claim=claim.claim_name(pipeline),
            seniority=known.seniority if known else ("", pipeline.uid),
            users=self._users(pipeline),
        )
        if found is None:
            blocker = _missing(pipeline) if _starts_on_own_claim(pipeline) else None
            return replace(
                workspace, missing=not pipeline.spec.workspace.existing_claim, blocker=blocker
            )
        if message := claim.ownership_error(pipeline, found) or claim.sharing_error(
            pipeline, found
        ):
            return replace(workspace, blocker=Blocker(Reason.VOLUME_NOT_READY, message))
        if pipeline.spec.workspace.existing_claim:
            return workspace
        differences = "; ".join(claim.immutable_differences(pipeline, found))
        return replace(
            workspace,
            warning=Blocker(Reason.VOLUME_NOT_READY, differences) if differences else None,
            changes=tuple(claim.pending_changes(pipeline, found)),
        )

    async def _find(self, pipeline: Pipeline) -> Object | None:
        """Return the claim from the cache; a user's own claim, which no informer watches, from the API server."""
        name = (pipeline.key.namespace, claim.claim_name(pipeline))
        if found := self.cache.claims.get(name):
            return found
        return await self.api.get(paths.claims(*name)) if _starts_on_own_claim(pipeline) else None

    def _users(self, pipeline: Pipeline) -> tuple[ClaimUser, ...]:
        namespace, name = pipeline.key.namespace, claim.claim_name(pipeline)
        users = {
            one.key: one.as_claim_user()
            for one in self.cache.pipelines.select("claim", (namespace, name))
            if one.uid != pipeline.uid
        }
        own_jobs = {job["metadata"]["uid"] for job in self.cache.jobs.select("owner", pipeline.uid)}
        for writer in self.cache.writers(namespace, name):
            if not _is_own(pipeline, own_jobs, writer):
                key = owner_key(writer) or Key(namespace, writer["metadata"]["name"])
                users[key] = replace(
                    users.get(key) or ClaimUser(key.name, writing=True), writing=True
                )
        return tuple(users.values())

    async def create(self, pipeline: Pipeline, storage_class: str | None = None) -> None:
        """Create the claim, unless it exists by now; `storage_class` is for a pipeline that names none."""
        desired = claim.build_claim(pipeline, storage_class)
        try:
            created = await self.api.create(paths.claims(pipeline.key.namespace), desired)
        except AlreadyExists:
            found = await self.api.get(
                paths.claims(pipeline.key.namespace, claim.claim_name(pipeline))
            )
            if found is None:
                raise
            if message := claim.ownership_error(pipeline, found):
                raise Blocked(Reason.VOLUME_NOT_READY, message) from None
            created = found
        self.cache.update(CLAIMS, created)

    async def change(self, pipeline: Pipeline, change: ClaimChange) -> None:
        """Change the claim to what the spec asks for."""
        path = paths.claims(pipeline.key.namespace, claim.claim_name(pipeline))
        self.cache.update(CLAIMS, await self.api.patch(path, dict(change.patch)))


def _starts_on_own_claim(pipeline: Pipeline) -> bool:
    """Return whether the pipeline waits for a start on a claim of the user.

    While a Job runs, the claim is there; the events of a later pod say it if not.
    """
    waits = not pipeline.status.running_attempts() and not pipeline.status.finished_at
    return bool(pipeline.spec.workspace.existing_claim) and waits


def _missing(pipeline: Pipeline) -> Blocker:
    name = claim.claim_name(pipeline)
    return Blocker(
        Reason.VOLUME_NOT_READY,
        f"workspace.existingClaim: the namespace {pipeline.key.namespace} has no claim {name}: create it, or "
        "correct the name",
    )


def _is_own(pipeline: Pipeline, own_jobs: set[str], writer: Object) -> bool:
    """Return whether a Job or pod is this pipeline's, and not of an earlier pipeline with the same name."""
    owners = {ref["uid"] for ref in writer["metadata"]["ownerReferences"]}
    return not owners.isdisjoint({pipeline.uid, *own_jobs}) or _job_name(writer) in _attempts(
        pipeline
    )


def _job_name(writer: Object) -> str:
    owners = (ref for ref in writer["metadata"]["ownerReferences"] if ref["kind"] == "Job")
    return next((str(ref["name"]) for ref in owners), "")


def _attempts(pipeline: Pipeline) -> set[str]:
    return {attempt.job for stage in pipeline.status.stages.values() for attempt in stage.attempts}
