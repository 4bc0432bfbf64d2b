"""The pipeline's own claim is deleted while Jobs that have ended still hold it, as Kubernetes does it."""

import asyncio
import json
from datetime import UTC, datetime

import pytest
from support.operator.cluster_objects import job_of
from support.operator.fake_api import FakeApi
from support.operator.scenario import UID, Scenario, a_pipeline

from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache.cache import (
    CLAIMS,
    JOBS,
    PIPELINES,
    ResourceCache,
)
from finetune_operator.kubernetes.cache.change import Urgency
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.kubernetes.workspaces import Workspaces
from finetune_operator.reconcile import reconcile

NOW = datetime(2030, 1, 3, tzinfo=UTC)
KEY = Key("team", "demo")
CLAIM = "/api/v1/namespaces/team/persistentvolumeclaims/demo-workspace"
JOBS_PATH = "/apis/batch/v1/namespaces/team/jobs"
PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
STAGES = ("prepare", "train", "evaluate", "push")
COMPLETE = {"type": "Complete", "status": "True"}
SHARED = {"workspace": {"accessMode": "ReadWriteMany"}}


class Renewal:
    """A finished pipeline, its claim and its Jobs at an API server."""

    def __init__(self, **edit):
        self.api = FakeApi()
        finished = Scenario(a_pipeline(deploy=None)).finish()
        status = json.loads(finished.cluster.pipelines[finished.key].status)
        spec = a_pipeline(deploy=None, **edit)
        meta = {"uid": UID, "generation": 1 + bool(edit)}
        content = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.api.put(PIPELINE, {"metadata": meta, "spec": content, "status": status})
        before = Pipeline(KEY, UID, 1, a_pipeline(deploy=None))
        self.api.put(CLAIM, build_claim(before))
        for stage in status["stages"]:
            if stage["name"] in STAGES:
                name = stage["attempts"][0]["job"]
                job = job_of("demo", stage["name"], COMPLETE, uid=name)
                job["metadata"] |= {"name": name}
                job["metadata"]["ownerReferences"][0]["uid"] = UID
                self.api.put(f"{JOBS_PATH}/{name}", job)
        self.cluster = KubernetesCluster(
            self.api, ResourceCache(), NoProgress(), NoProbe()
        )
        self.settle()

    @property
    def jobs(self):
        """The Jobs that exist."""
        return [path for path in self.api.objects if path.startswith(JOBS_PATH)]

    @property
    def status(self):
        """The status of the pipeline."""
        return self.api.objects[PIPELINE]["status"]

    @property
    def message(self):
        """The message of the condition Ready."""
        conditions = self.status["conditions"]
        return {item["type"]: item["message"] for item in conditions}["Ready"]

    def settle(self):
        """Reconcile a few times, as the watches would."""
        for _ in range(4):
            cache = ResourceCache()
            self.cluster = KubernetesCluster(self.api, cache, NoProgress(), NoProbe())
            kinds = {PIPELINE: PIPELINES, CLAIM: CLAIMS}
            for path, content in self.api.objects.items():
                cache.update(kinds.get(path, JOBS), content)
            asyncio.run(reconcile(KEY, self.cluster, Settings(), NOW))

    def delete_claim(self):
        """Delete the claim as a user does: it exists until its last pod is gone."""
        meta = self.api.objects[CLAIM]["metadata"]
        meta["deletionTimestamp"] = "2030-01-03T00:00:00Z"
        self.settle()
        if not self.jobs:
            del self.api.objects[CLAIM]
            self.settle()


def test_advice_to_delete_the_claim_works():
    renewal = Renewal(**SHARED)
    assert "delete it; all stages then run again" in renewal.message
    renewal.delete_claim()
    claim = renewal.api.objects[CLAIM]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert [job.rpartition("/")[2][-10:] for job in renewal.jobs] == ["prepare-a2"]


def test_claim_deleted_to_save_storage_is_freed():
    renewal = Renewal()
    assert renewal.jobs
    renewal.delete_claim()
    assert renewal.jobs == []
    assert CLAIM not in renewal.api.objects
    assert renewal.status["phase"] == "Succeeded"


def test_claim_that_others_hold_names_the_command_to_list_them():
    renewal = Renewal(**SHARED)
    meta = renewal.api.objects[CLAIM]["metadata"]
    meta["deletionTimestamp"] = "2030-01-03T00:00:00Z"
    renewal.settle()
    assert "`kubectl describe pvc demo-workspace`" in renewal.message
    assert renewal.status["phase"] == "Pending"


def test_lost_volume_says_what_to_do_and_does_it():
    renewal = Renewal(train={"optimizer": {"learningRate": 3e-4}})
    for path in renewal.jobs:
        del renewal.api.objects[path]
    renewal.api.objects[CLAIM]["status"] = {"phase": "Lost"}
    renewal.settle()
    assert "(phase Lost): delete the claim" in renewal.message
    del renewal.api.objects[CLAIM]
    renewal.settle()
    assert [job.rpartition("/")[2][-10:] for job in renewal.jobs] == ["prepare-a2"]


def test_claim_without_the_operators_label_loses_no_result():
    """No watch shows it, but the API server has it."""
    renewal = Renewal(train={"optimizer": {"learningRate": 3e-4}})
    before = renewal.api.objects[CLAIM]
    assert [stage["name"] for stage in renewal.status["stages"] if "result" in stage]
    cache = ResourceCache()
    cache.update(PIPELINES, renewal.api.objects[PIPELINE])
    cluster = KubernetesCluster(renewal.api, cache, NoProgress(), NoProbe())
    asyncio.run(reconcile(KEY, cluster, Settings(), NOW))
    stages = {stage["name"]: stage for stage in renewal.status["stages"]}
    assert "result" in stages["prepare"]
    assert renewal.api.objects[CLAIM] == before


@pytest.mark.parametrize("node", ["", "gpu-1"])
def test_claim_deleted_before_its_pod_has_a_node(node):
    """Kubernetes protects the claim of a pod with a node only; a claim without the label is no lost claim."""
    scenario = Scenario(a_pipeline()).run("prepare")
    job = scenario.attempt("train").job
    scenario.cluster.update_job(job, node=node)
    status = scenario.reconcile_until_stable().status
    pipeline = Pipeline(KEY, UID, 1, a_pipeline(), status=status)
    api = FakeApi()
    workspaces = Workspaces(api, ResourceCache())
    assert asyncio.run(workspaces.observe(pipeline)).gone is (node == "")
    api.put(CLAIM, build_claim(pipeline))
    assert not asyncio.run(workspaces.observe(pipeline)).gone


@pytest.mark.parametrize("other", ["other", "third"])
def test_all_users_of_a_claim_are_woken_when_it_goes(other):
    """Ended Jobs of another pipeline hold the claim, too."""
    cache = ResourceCache()
    spec = {"workspace": {"existingClaim": "demo-workspace"}}
    meta = {"namespace": "team", "name": other, "uid": other, "generation": 1}
    cache.update(PIPELINES, {"metadata": meta | {"resourceVersion": "1"}, "spec": spec})
    pipeline = Pipeline(KEY, UID, 1, a_pipeline())
    claim = build_claim(pipeline)
    claim["metadata"] |= {"uid": "c", "resourceVersion": "2"}
    cache.update(CLAIMS, claim)
    going = {**claim["metadata"], "deletionTimestamp": "2030", "resourceVersion": "3"}
    change = cache.update(CLAIMS, {**claim, "metadata": going})
    assert change.urgency == Urgency.NOW
    assert Key("team", other) in change.keys
