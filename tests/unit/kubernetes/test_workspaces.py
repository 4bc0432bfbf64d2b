"""The claim of a workspace: which pipeline may use it, and what an edit of the pipeline changes about it."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support.fake_api import FakeApi
from support.pods import job_condition
from support.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import CreateJob, DeletePipeline
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.reconcile import reconcile

CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
JOBS = "/apis/batch/v1/namespaces/team/jobs"


class SharedClaim:
    """Two pipelines with the same existing claim as workspace."""

    def __init__(self):
        self.api, self.cache = FakeApi(), ResourceCache()
        self.api.put(f"{CLAIMS}/shared", {})
        self.cluster = KubernetesCluster(self.api, self.cache, NoProgress(), NoProbe())
        self.pipelines = {
            name: self.submit(name, created) for name, created in (("older", "2030"), ("younger", "2031"))
        }

    def submit(self, name, created):
        spec = a_pipeline(workspace={"existingClaim": "shared"})
        self.update(name, created)
        return Pipeline(Key("team", name), f"uid-{name}", 1, spec)

    def update(self, name, created, **status):
        meta = {"namespace": "team", "name": name, "uid": f"uid-{name}", "creationTimestamp": created}
        spec = {"workspace": {"existingClaim": "shared"}}
        self.cache.update_pipeline({"metadata": meta, "spec": spec, "status": status})

    async def start(self, name):
        """Create the pipeline's first Job; return the blocker's reason, or None."""
        scenario = Scenario(self.pipelines[name].spec, name=name).reconcile_until_stable()
        [job] = scenario.cluster.jobs.values()
        template = replace(job.template, name=f"{name}-prepare-a1")
        try:
            await self.cluster.apply(self.pipelines[name], [CreateJob(template)])
        except ClusterError:
            observed = await self.cluster.observe(self.pipelines[name])
            return observed.blocked[template.name].reason
        return None

    @property
    def jobs(self):
        return [where.rpartition("/")[2] for where in self.api.objects if where.startswith(JOBS)]


@pytest.fixture
def sharing():
    return SharedClaim()


def test_older_waiting_pipeline_takes_precedence(sharing):
    assert asyncio.run(sharing.start("younger")) is Reason.WORKSPACE_IN_USE
    assert asyncio.run(sharing.start("older")) is None
    assert sharing.jobs == ["older-prepare-a1"]


def test_running_pipeline_keeps_the_claim_from_an_older_one(sharing):
    sharing.update("older", "2030", finishedAt="2030-01-02T00:00:00Z")
    assert asyncio.run(sharing.start("younger")) is None
    sharing.update("older", "2030")  # after a retry it is unfinished again
    assert asyncio.run(sharing.start("older")) is Reason.WORKSPACE_IN_USE
    assert sharing.jobs == ["younger-prepare-a1"]


def test_finished_job_frees_the_claim(sharing):
    sharing.update("older", "2030", finishedAt="2030-01-02T00:00:00Z")
    asyncio.run(sharing.start("younger"))
    sharing.update("older", "2030")
    [job] = sharing.cache.jobs.values()
    sharing.cache.update_job({**job, "status": {"conditions": [job_condition("Failed")]}})
    assert asyncio.run(sharing.start("older")) is None


@pytest.mark.parametrize(("created", "reason"), [("2031-01-01T00:00:00Z", Reason.WORKSPACE_IN_USE), (None, None)])
def test_attempt_holds_the_claim_once_its_job_was_observed(sharing, created, reason):
    attempt = {"number": 1, "outcome": "Running", **({"createdAt": created} if created else {})}
    sharing.update("younger", "2031", stages={"train": {"attempts": [attempt]}})
    assert asyncio.run(sharing.start("older")) is reason


def test_finished_job_frees_the_claim_despite_an_old_status(sharing):
    """The status may still have the attempt as running, for example while it cannot be written."""
    sharing.update("older", "2030", finishedAt="2030-01-02T00:00:00Z")
    asyncio.run(sharing.start("younger"))
    [job] = sharing.cache.jobs.values()
    running = {"number": 1, "job": job["metadata"]["name"], "outcome": "Running", "createdAt": "2031-01-01T00:00:00Z"}
    sharing.update("younger", "2031", stages={"prepare": {"attempts": [running]}})
    sharing.update("older", "2030")
    assert asyncio.run(sharing.start("older")) is Reason.WORKSPACE_IN_USE
    sharing.cache.update_job({**job, "status": {"conditions": [job_condition("Complete")]}})
    assert asyncio.run(sharing.start("older")) is None


def test_concurrent_reconciles_create_one_job(sharing):
    finished = {"finishedAt": "2030-01-02T00:00:00Z"}
    sharing.update("older", "2030", **finished)
    get = sharing.api.get

    async def get_slowly(path):
        await asyncio.sleep(0.01)
        sharing.update("older", "2030")
        return await get(path)

    async def scenario():
        sharing.api.get = get_slowly
        return await asyncio.gather(sharing.start("younger"), sharing.start("older"))

    asyncio.run(scenario())
    assert len(sharing.jobs) == 1


CLAIM = f"{CLAIMS}/demo-workspace"
PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
FORBIDDEN = ApiError(403, "cannot set an ownerRef on a resource you cannot delete", "Forbidden")


class OwnClaim:
    """A suspended pipeline that was edited, and the claim that the operator created for it."""

    def __init__(self, before=None, after=None):
        self.api = FakeApi()
        pipeline = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline(workspace=before or {}))
        self.api.put(CLAIM, build_claim(pipeline))
        self.generation = 1
        self.edit(after or {})
        self.restart()

    def edit(self, workspace):
        self.generation += 1
        spec = a_pipeline(workspace=workspace, suspend=True).model_dump(mode="json", by_alias=True, exclude_none=True)
        status = self.api.objects.get(PIPELINE, {}).get("status", {})
        meta = {"uid": "uid-1", "generation": self.generation, "resourceVersion": "1"}
        self.api.put(PIPELINE, {"metadata": meta, "spec": spec, "status": status})

    def restart(self):
        """Replace the operator by a new one, without its memory."""
        self.cluster = KubernetesCluster(self.api, ResourceCache(), NoProgress(), NoProbe())

    def reconcile(self):
        with suppress(ClusterError):
            asyncio.run(reconcile(Key("team", "demo"), self.cluster, Settings(), datetime.now(UTC)))

    @property
    def owners(self):
        return [owner["uid"] for owner in self.api.objects[CLAIM]["metadata"]["ownerReferences"]]

    @property
    def ready(self):
        conditions = self.api.objects[PIPELINE]["status"]["conditions"]
        return next(one for one in conditions if one["type"] == "Ready")

    def claim_reads(self):
        return self.api.reads.count(CLAIM)


def test_when_deleted_is_applied_after_a_failed_patch():
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.api.rejected_patches["ownerReferences"] = ApiError(0, "the API server does not answer")
    own.reconcile()
    assert own.owners == ["uid-1"]
    own.api.rejected_patches.clear()
    own.reconcile()
    assert own.owners == []


def test_when_deleted_is_applied_by_a_restarted_operator():
    """The first operator crashes after it wrote the status, before it changed the claim."""
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.cluster.apply = None
    with pytest.raises(TypeError):
        own.reconcile()
    assert own.api.objects[PIPELINE]["status"]["observedGeneration"] == own.generation
    own.restart()
    own.reconcile()
    assert own.owners == []


def test_matching_claim_is_read_once_per_edit():
    own = OwnClaim({}, {"whenDeleted": "Delete"})
    for _ in range(4):
        own.reconcile()
    assert (own.owners, own.claim_reads()) == (["uid-1"], 1)
    own.edit({"whenDeleted": "Retain"})
    for _ in range(4):
        own.reconcile()
    assert (own.owners, own.claim_reads()) == ([], 2)


def test_rejected_retention_is_reported_and_retried():
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.api.rejected_patches["ownerReferences"] = FORBIDDEN
    for _ in range(3):
        own.reconcile()
    assert own.api.writes.count(f"reject {CLAIM}") == 3
    assert "workspace.whenDeleted: cannot set an ownerRef" in own.ready["message"]
    own.api.rejected_patches.clear()
    own.reconcile()
    own.reconcile()
    assert "whenDeleted" not in own.ready["message"]


def test_pipeline_is_not_deleted_before_its_claim_is_retained():
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.api.rejected_patches["ownerReferences"] = FORBIDDEN

    async def scenario():
        pipeline = await own.cluster.read(Key("team", "demo"))
        await own.cluster.observe(pipeline)
        await own.cluster.apply(pipeline, [DeletePipeline()])

    with pytest.raises(ClusterError):
        asyncio.run(scenario())
    assert PIPELINE in own.api.objects
    own.api.rejected_patches.clear()
    own.restart()
    asyncio.run(scenario())
    assert PIPELINE not in own.api.objects


def test_foreign_owner_references_stay():
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    foreign = {"kind": "Team", "uid": "team"}
    own.api.objects[CLAIM]["metadata"]["ownerReferences"].append(foreign)
    own.reconcile()
    assert own.owners == ["team"]


def size_of(own):
    return own.api.objects[CLAIM]["spec"]["resources"]["requests"]["storage"]


def test_larger_size_grows_the_claim_only():
    own = OwnClaim({"size": "10Gi", "storageClassName": "fast"}, {"size": "20Gi", "storageClassName": "fast"})
    own.reconcile()
    assert size_of(own) == "20Gi"
    assert own.api.objects[CLAIM]["spec"]["storageClassName"] == "fast"
    assert own.ready["message"] == "suspended; it continues where it stopped when resumed"


@pytest.mark.parametrize(
    ("current", "desired"), [("512Gi", "0.5Ti"), ("1Gi", "1073741824"), ("1500m", "1.5"), ("1e3", "1k")]
)
def test_equal_size_in_another_unit_changes_nothing(current, desired):
    own = OwnClaim({}, {"size": desired})
    own.api.objects[CLAIM]["spec"]["resources"]["requests"]["storage"] = current
    own.reconcile()
    assert size_of(own) == current
    assert "size" not in own.ready["message"]


def test_rejected_growth_is_reported_until_it_succeeds():
    own = OwnClaim({"size": "10Gi"}, {"size": "20Gi", "whenDeleted": "Delete"})
    message = "only dynamically provisioned pvc can be resized"
    own.api.rejected_patches["requests"] = ApiError(403, message, "Forbidden")
    own.reconcile()
    own.reconcile()
    assert f"workspace.size: {message}" in own.ready["message"]
    assert own.owners == ["uid-1"], "the other change is applied"
    own.api.rejected_patches.clear()
    own.reconcile()
    own.reconcile()
    assert (size_of(own), "size" in own.ready["message"]) == ("20Gi", False)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({"size": "20Gi"}, {"size": "10Gi"}, "cannot shrink to 10Gi: set it to 20Gi"),
        ({"storageClassName": "fast"}, {"storageClassName": "slow"}, "has class fast, not slow"),
        ({}, {"accessMode": "ReadWriteMany"}, "has ReadWriteOnce, not ReadWriteMany"),
    ],
)
def test_immutable_difference_is_reported_and_read_once(before, after, text):
    own = OwnClaim(before, after)
    own.reconcile()
    assert text in own.ready["message"]
    stored = dict(own.api.objects[CLAIM])
    own.reconcile()
    assert own.api.objects[CLAIM] == stored
    assert own.claim_reads() == 1


def test_workspace_blocker_does_not_stop_the_stages():
    scenario = Scenario().reconcile_until_stable()
    blocker = Blocker(Reason.VOLUME_NOT_READY, "workspace.size: no")
    observe = scenario.cluster.observe

    async def observed(pipeline):
        return replace(await observe(pipeline), workspace_blocker=blocker)

    scenario.cluster.observe = observed
    scenario.finish()
    ready = next(one for one in scenario.status.conditions if one.type == "Ready")
    assert (ready.status, ready.reason) == ("True", Reason.ALL_STAGES_SUCCEEDED)
    assert "workspace.size: no" in ready.message
