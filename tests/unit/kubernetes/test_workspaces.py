"""The claim that the operator creates: what an edit of the pipeline changes about it."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support.operator.fake_api import FakeApi
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache.cache import CLAIMS as CLAIM_KIND
from finetune_operator.kubernetes.cache.cache import PIPELINES, ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.reconcile import reconcile

CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
JOBS_PATH = "/apis/batch/v1/namespaces/team/jobs"
FINETUNE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines"


NOW = datetime(2030, 1, 1, tzinfo=UTC)
FINISHED = {"finishedAt": "2030-01-02T00:00:00Z"}
INTERRUPTED = '{"interruption": {"step": 4, "savedStep": 4}}'


CLAIM = f"{CLAIMS}/demo-workspace"
PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
FORBIDDEN = ApiError(
    403, "cannot set an ownerRef on a resource you cannot delete", "Forbidden"
)


class OwnClaim:
    """A suspended pipeline that was edited, and the claim that the operator created for it."""

    def __init__(self, before=None, after=None):
        self.api = FakeApi()
        pipeline = Pipeline(
            Key("team", "demo"), "uid-1", 1, a_pipeline(workspace=before or {})
        )
        self.api.put(CLAIM, build_claim(pipeline))
        self.generation = 1
        self.restart()
        self.edit(after or {})

    def edit(self, workspace, *, suspend=True):
        self.generation += 1
        spec = a_pipeline(workspace=workspace, suspend=suspend).model_dump(
            mode="json", by_alias=True, exclude_none=True
        )
        status = self.api.objects.get(PIPELINE, {}).get("status", {})
        meta = {"uid": "uid-1", "generation": self.generation}
        self.api.put(PIPELINE, {"metadata": meta, "spec": spec, "status": status})

    def restart(self):
        """Replace the operator by a new operator, without its memory."""
        self.cache = ResourceCache()
        self.cluster = KubernetesCluster(self.api, self.cache, NoProgress(), NoProbe())

    def reconcile(self):
        """Reconcile with what the watches show."""
        for kind, path in ((PIPELINES, PIPELINE), (CLAIM_KIND, CLAIM)):
            if path in self.api.objects:
                self.cache.update(kind, self.api.objects[path])
        with suppress(ClusterError):
            return asyncio.run(
                reconcile(Key("team", "demo"), self.cluster, Settings(), NOW)
            )

    @property
    def owners(self):
        return [
            owner["uid"]
            for owner in self.api.objects[CLAIM]["metadata"]["ownerReferences"]
        ]

    @property
    def ready(self):
        conditions = self.api.objects[PIPELINE]["status"]["conditions"]
        return next(
            condition for condition in conditions if condition["type"] == "Ready"
        )


def test_when_deleted_is_applied_after_a_failed_patch():
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.api.rejected_patches["ownerReferences"] = ApiError(
        0, "the API server does not answer"
    )
    own.reconcile()
    assert own.owners == ["uid-1"]
    own.api.rejected_patches.clear()
    own.reconcile()
    assert own.owners == []


def test_when_deleted_is_applied_by_a_restarted_operator():
    """The first operator crashes after it wrote the status, before it changed the claim."""
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.cluster.apply = None  # type: ignore[assignment]  # a call of it is the crash
    with pytest.raises(TypeError):
        own.reconcile()
    assert own.api.objects[PIPELINE]["status"]["observedGeneration"] == own.generation
    own.restart()
    own.reconcile()
    assert own.owners == []


def test_matching_claim_is_not_written_or_read():
    own = OwnClaim({}, {"whenDeleted": "Delete"})
    for owners, patches in ((["uid-1"], 1), ([], 2)):
        for _ in range(4):
            own.reconcile()
        assert own.owners == owners
        assert CLAIM not in own.api.reads
        assert own.api.writes.count(f"patch {CLAIM}") == patches
        own.edit({"whenDeleted": "Retain"})


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


def test_foreign_owner_references_stay():
    own = OwnClaim({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    foreign = {"kind": "Team", "uid": "team"}
    own.api.objects[CLAIM]["metadata"]["ownerReferences"].append(foreign)
    own.reconcile()
    assert own.owners == ["team"]


def size_of(own):
    return own.api.objects[CLAIM]["spec"]["resources"]["requests"]["storage"]


def test_larger_size_grows_the_claim_only():
    own = OwnClaim(
        {"size": "10Gi", "storageClassName": "fast"},
        {"size": "20Gi", "storageClassName": "fast"},
    )
    own.reconcile()
    assert size_of(own) == "20Gi"
    assert own.api.objects[CLAIM]["spec"]["storageClassName"] == "fast"
    assert own.ready["message"].startswith(
        "suspended; it continues where it stopped when resumed (see "
    )


@pytest.mark.parametrize(
    ("current", "desired"),
    [
        ("512Gi", "0.5Ti"),
        ("1Gi", "1073741824"),
        ("1500M", "1.5G"),
        ("1e9", "1G"),
        ("1048576Ki", "1Gi"),
    ],
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
    assert size_of(own) == "20Gi"
    assert "size" not in own.ready["message"]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({"size": "20Gi"}, {"size": "10Gi"}, "cannot shrink to 10Gi: set it to 20Gi"),
        (
            {"storageClassName": "fast"},
            {"storageClassName": "slow"},
            "has class fast, not slow",
        ),
        ({}, {"accessMode": "ReadWriteMany"}, "has ReadWriteOnce, not ReadWriteMany"),
    ],
)
def test_immutable_difference_is_reported_and_left_alone(before, after, text):
    own = OwnClaim(before, after)
    own.reconcile()
    assert text in own.ready["message"]
    stored = dict(own.api.objects[CLAIM])
    own.reconcile()
    assert own.api.objects[CLAIM] == stored


def test_workspace_warning_does_not_stop_the_stages():
    scenario = Scenario().reconcile_until_stable()
    warning = Blocker(Reason.VOLUME_NOT_READY, "workspace.size: no")
    observe = scenario.cluster.observe

    async def observed(pipeline):
        result = await observe(pipeline)
        return replace(result, workspace=replace(result.workspace, warning=warning))

    scenario.cluster.observe = observed
    scenario.finish()
    ready = next(
        condition
        for condition in scenario.status.conditions
        if condition.type == "Ready"
    )
    assert (ready.status, ready.reason) == ("True", Reason.ALL_STAGES_SUCCEEDED)
    assert "workspace.size: no" in ready.message


def test_claim_of_another_pipeline_is_not_used():
    own = OwnClaim()
    own.api.objects[CLAIM]["metadata"]["annotations"] = {
        "finetune.dev/workspace-of": "another"
    }
    own.edit({}, suspend=False)
    own.reconcile()
    assert own.ready["reason"] == "VolumeNotReady"
    assert "was not created for this pipeline" in own.ready["message"]


def test_claim_created_by_an_earlier_leader_is_used():
    """Its watch event has not arrived yet."""
    own = OwnClaim()
    own.edit({}, suspend=False)
    own.cache.update(PIPELINES, own.api.objects[PIPELINE])
    asyncio.run(reconcile(Key("team", "demo"), own.cluster, Settings(), NOW))
    assert len([path for path in own.api.objects if path.startswith(JOBS_PATH)]) == 1


def test_refused_claim_is_told_and_no_job_is_created():
    own = OwnClaim()
    del own.api.objects[CLAIM]
    own.edit({}, suspend=False)
    own.api.rejected_creates["persistentvolumeclaims"] = ApiError(
        403, "exceeded quota: storage", "Forbidden"
    )
    own.reconcile()
    assert "exceeded quota: storage" in own.ready["message"]
    assert not [path for path in own.api.objects if path.startswith(JOBS_PATH)]
    own.api.rejected_creates.clear()
    own.reconcile()
    assert CLAIM in own.api.objects
    assert len([path for path in own.api.objects if path.startswith(JOBS_PATH)]) == 1
