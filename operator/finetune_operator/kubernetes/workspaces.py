"""The claims of workspaces: their state, their users, and the requests that create and change them."""

from dataclasses import replace

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import (
    Blocker,
    ClaimChange,
    ClaimUser,
    ObservedWorkspace,
)
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.workspace import WRITING_STAGES, start_blocker
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.cache import CLAIMS, ResourceCache
from finetune_operator.kubernetes.cache.children import owner_key
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.resources import claim
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, Blocked
from finetune_operator.kubernetes.translate.object import Object


class Workspaces:
    """The claims of pipelines."""

    def __init__(self, api: KubernetesClient, cache: ResourceCache) -> None:
        self.api = api
        self.cache = cache

    async def observe(self, pipeline: Pipeline) -> ObservedWorkspace:
        """Return the claim as it is, and the other pipelines that use it."""
        known = self.cache.pipelines.get((pipeline.key.namespace, pipeline.key.name))
        workspace = ObservedWorkspace(
            claim=claim.claim_name(pipeline),
            seniority=known.seniority if known else ("", pipeline.uid),
            users=self._users(pipeline),
            read_results=self._read_results(pipeline),
        )
        # A request for each pipeline in line would only find what the first in line finds.
        if pipeline.spec.workspace.existing_claim and start_blocker(workspace):
            return workspace
        existing = await self._read(pipeline)
        if existing is None:
            blocker = _missing(pipeline) if _starts_on_own_claim(pipeline) else None
            return replace(
                workspace,
                missing=not pipeline.spec.workspace.existing_claim,
                gone=_starts_on_own_claim(pipeline) or _may_miss_results(pipeline),
                blocker=blocker,
            )
        return self._with_claim(workspace, pipeline, existing)

    def _with_claim(
        self, workspace: ObservedWorkspace, pipeline: Pipeline, existing: Object
    ) -> ObservedWorkspace:
        """Return the workspace with the state of the claim."""
        message = claim.ownership_error(pipeline, existing)
        if message is None:
            message = claim.sharing_error(pipeline, existing)
        own = not pipeline.spec.workspace.existing_claim
        differences = ""
        if own:
            differences = "; ".join(claim.immutable_differences(pipeline, existing))
        if message:
            return replace(
                workspace,
                deleting=claim.is_deleting(existing),
                outdated=own and bool(differences or claim.is_lost(existing)),
                blocker=Blocker(Reason.VOLUME_NOT_READY, message),
                warning=_leaving(pipeline, existing),
            )
        # A user's own claim is not the operator's to change.
        if not own:
            return workspace
        warning = Blocker(Reason.VOLUME_NOT_READY, differences) if differences else None
        return replace(
            workspace,
            outdated=bool(differences),
            warning=warning,
            changes=tuple(claim.pending_changes(pipeline, existing)),
        )

    async def _read(self, pipeline: Pipeline) -> Object | None:
        """Return the claim from the cache; a user's own claim, which no informer watches, from the API server."""
        name = (pipeline.key.namespace, claim.claim_name(pipeline))
        cached = self.cache.claims.get(name)
        if cached:
            return cached
        # A claim without the operator's label exists, although no watch shows it: its results are not lost.
        is_needed = _starts_on_own_claim(pipeline) or _may_miss_results(pipeline)
        if self.cache.has_all_claims and not is_needed:
            return None
        return await self.api.get(paths.claims(*name))

    def _users(self, pipeline: Pipeline) -> tuple[ClaimUser, ...]:
        namespace = pipeline.key.namespace
        name = claim.claim_name(pipeline)
        users = {
            other.key: other.as_claim_user()
            for other in self.cache.pipelines.select("claim", (namespace, name))
            if other.uid != pipeline.uid
        }
        own_jobs = {
            job["metadata"]["uid"]
            for job in self.cache.jobs.select("owner", pipeline.uid)
        }
        for writer in self.cache.writers(namespace, name):
            if _is_own(pipeline, own_jobs, writer):
                continue
            # A Job or pod without a pipeline counts under its own name.
            key = owner_key(writer) or Key(namespace, writer["metadata"]["name"])
            user = users.get(key) or ClaimUser(key.name, writing=True)
            users[key] = replace(user, writing=True)
        return tuple(users.values())

    def _read_results(self, pipeline: Pipeline) -> frozenset[str]:
        """Return the results in the claim that pipelines of the namespace read by their paths."""
        name = claim.claim_name(pipeline)
        readers = self.cache.pipelines.select("reads", (pipeline.key.namespace, name))
        return frozenset(
            result
            for reader in readers
            for read_claim, result in reader.read_results
            if read_claim == name
        )

    async def create(
        self, pipeline: Pipeline, storage_class: str | None = None
    ) -> None:
        """Create the claim unless it exists by now; `storage_class` is the default for a pipeline without a class."""
        desired = claim.build_claim(pipeline, storage_class)
        try:
            created = await self.api.create(
                paths.claims(pipeline.key.namespace), desired
            )
        except AlreadyExists:
            # The cache may be behind, or the claim may have lost the operator's label.
            path = paths.claims(pipeline.key.namespace, claim.claim_name(pipeline))
            existing = await self.api.get(path)
            if existing is None:
                raise
            message = claim.ownership_error(pipeline, existing)
            if message:
                raise Blocked(Reason.VOLUME_NOT_READY, message) from None
            created = existing
        self.cache.update(CLAIMS, created)

    async def change(self, pipeline: Pipeline, change: ClaimChange) -> None:
        """Apply a change that the spec asks for to the claim."""
        path = paths.claims(pipeline.key.namespace, claim.claim_name(pipeline))
        self.cache.update(CLAIMS, await self.api.patch(path, dict(change.patch)))


def _starts_on_own_claim(pipeline: Pipeline) -> bool:
    """Return whether the pipeline waits for a start on a claim of the user.

    While a Job runs, the claim exists. If it is deleted later, the events of the next pod report it.
    """
    waits = not pipeline.status.running_attempts() and not pipeline.status.finished_at
    return bool(pipeline.spec.workspace.existing_claim) and waits


def _may_miss_results(pipeline: Pipeline) -> bool:
    """Return whether a stage may need the pipeline's own claim: the results in it, or its attempt waits with it."""
    status = pipeline.status
    own = not pipeline.spec.workspace.existing_claim
    running = status.running_attempts()
    if own and running:
        # A pod that has a node keeps its claim.
        return all(
            stage in WRITING_STAGES and attempt.created_at and not attempt.node
            for stage, attempt in running.items()
        )
    has_results = any(
        stage.result for name, stage in status.stages.items() if name in WRITING_STAGES
    )
    if not own or not has_results:
        return False
    edited = status.observed_generation != pipeline.generation
    unfinished = status.finished_at is None
    return bool(unfinished or edited or pipeline.retry or status.workspace_outdated)


def _leaving(pipeline: Pipeline, existing: Object) -> Blocker | None:
    """Return that the results of a running Job are lost, because its claim is being deleted; None if none runs."""
    attempts = pipeline.status.running_attempts()
    running = [
        attempt.job for stage, attempt in attempts.items() if stage in WRITING_STAGES
    ]
    if not claim.is_deleting(existing) or not running:
        return None
    name = existing["metadata"]["name"]
    return Blocker(
        Reason.VOLUME_NOT_READY,
        f"the claim {name} is being deleted, and all results with it as soon as the Job {running[0]} ends: copy what "
        "you need now. The stages then run again. To free the claim at once, set spec.suspend to true",
    )


def _missing(pipeline: Pipeline) -> Blocker:
    name = claim.claim_name(pipeline)
    return Blocker(
        Reason.VOLUME_NOT_READY,
        f"workspace.existingClaim: the namespace {pipeline.key.namespace} has no claim {name}: create it, or "
        "correct the name",
    )


def _is_own(pipeline: Pipeline, own_jobs: set[str], writer: Object) -> bool:
    """Return whether a Job or pod is this pipeline's, and not of an earlier pipeline with the same name."""
    owners = {reference["uid"] for reference in writer["metadata"]["ownerReferences"]}
    if not owners.isdisjoint({pipeline.uid, *own_jobs}):
        return True
    # The pod of a deleted Job: only the Job's name is left to compare.
    job = _job_name(writer)
    stages = pipeline.status.stages.values()
    return any(attempt.job == job for stage in stages for attempt in stage.attempts)


def _job_name(writer: Object) -> str:
    for reference in writer["metadata"]["ownerReferences"]:
        if reference["kind"] == "Job":
            return str(reference["name"])
    return ""
