"""The claim that holds a pipeline's work: whose turn it is, and what an edit of it does."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support.fake_api import FakeApi
from support.pods import over
from support.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import CreateJob, DeletePipeline
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.client import ApiError
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources import claim as volume
from finetune_operator.reconcile import reconcile

CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
JOBS = "/apis/batch/v1/namespaces/team/jobs"


class Sharing:
    """Two pipelines that were told to work on one claim."""

    def __init__(self):
        self.store, self.books = FakeApi(), ResourceCache()
        self.store.put(f"{CLAIMS}/shared", {})
        self.cluster = KubernetesCluster(self.store, self.books, NoProgress(), NoProbe())
        self.pipelines = {name: self.submit(name, born) for name, born in (("older", "2030"), ("younger", "2031"))}

    def submit(self, name, born):
        spec = a_pipeline(workspace={"existingClaim": "shared"})
        self.tell(name, born)
        return Pipeline(Key("team", name), f"uid-{name}", 1, spec)

    def tell(self, name, born, **status):
        meta = {"namespace": "team", "name": name, "uid": f"uid-{name}", "creationTimestamp": born}
        spec = {"workspace": {"existingClaim": "shared"}}
        self.books.update_pipeline({"metadata": meta, "spec": spec, "status": status})

    async def begin(self, name):
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
        return [where.rpartition("/")[2] for where in self.store.objects if where.startswith(JOBS)]


@pytest.fixture
def sharing():
    return Sharing()


def test_the_older_of_two_that_wait_for_a_claim_goes_first(sharing):
    assert asyncio.run(sharing.begin("younger")) is Reason.WORKSPACE_IN_USE
    assert asyncio.run(sharing.begin("older")) is None
    assert sharing.jobs == ["older-prepare-a1"]


def test_a_pipeline_that_runs_keeps_the_claim_also_from_an_older_one_that_is_begun_again(sharing):
    sharing.tell("older", "2030", finishedAt="2030-01-02T00:00:00Z")
    assert asyncio.run(sharing.begin("younger")) is None
    sharing.tell("older", "2030")  # somebody asks for a retry
    assert asyncio.run(sharing.begin("older")) is Reason.WORKSPACE_IN_USE
    assert sharing.jobs == ["younger-prepare-a1"]


def test_the_claim_is_free_when_the_younger_ones_job_is_over(sharing):
    sharing.tell("older", "2030", finishedAt="2030-01-02T00:00:00Z")
    asyncio.run(sharing.begin("younger"))
    sharing.tell("older", "2030")
    [job] = sharing.books.jobs.values()
    sharing.books.update_job({**job, "status": {"conditions": [over("Failed")]}})
    assert asyncio.run(sharing.begin("older")) is None


@pytest.mark.parametrize(("made", "reason"), [("2031-01-01T00:00:00Z", Reason.WORKSPACE_IN_USE), (None, None)])
def test_an_attempt_whose_job_was_seen_holds_the_claim_and_one_that_only_has_a_number_does_not(sharing, made, reason):
    attempt = {"number": 1, "outcome": "Running", **({"createdAt": made} if made else {})}
    sharing.tell("younger", "2031", stages={"train": {"attempts": [attempt]}})
    assert asyncio.run(sharing.begin("older")) is reason


def test_a_job_that_is_over_frees_the_claim_also_where_nobody_can_write_that_into_the_status(sharing):
    sharing.tell("older", "2030", finishedAt="2030-01-02T00:00:00Z")
    asyncio.run(sharing.begin("younger"))
    [job] = sharing.books.jobs.values()
    running = {"number": 1, "job": job["metadata"]["name"], "outcome": "Running", "createdAt": "2031-01-01T00:00:00Z"}
    sharing.tell("younger", "2031", stages={"prepare": {"attempts": [running]}})
    sharing.tell("older", "2030")
    assert asyncio.run(sharing.begin("older")) is Reason.WORKSPACE_IN_USE
    sharing.books.update_job({**job, "status": {"conditions": [over("Complete")]}})
    assert asyncio.run(sharing.begin("older")) is None


def test_two_that_look_at_the_same_moment_do_not_both_begin(sharing):
    finished = {"finishedAt": "2030-01-02T00:00:00Z"}
    sharing.tell("older", "2030", **finished)
    slow = sharing.store.get

    async def get(path):
        await asyncio.sleep(0.01)
        sharing.tell("older", "2030")
        return await slow(path)

    async def story():
        sharing.store.get = get
        return await asyncio.gather(sharing.begin("younger"), sharing.begin("older"))

    asyncio.run(story())
    assert len(sharing.jobs) == 1


CLAIM = f"{CLAIMS}/demo-workspace"
PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
FORBIDDEN = ApiError(403, "cannot set an ownerRef on a resource you cannot delete", "Forbidden")


class Own:
    """A pipeline that is over, and the claim that the operator made for it; edited meanwhile."""

    def __init__(self, before=None, after=None):
        self.store = FakeApi()
        made = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline(workspace=before or {}))
        self.store.put(CLAIM, volume.build_claim(made))
        self.generation = 1
        self.edit(after or {})
        self.restart()

    def edit(self, wish):
        self.generation += 1
        spec = a_pipeline(workspace=wish, suspend=True).model_dump(mode="json", by_alias=True, exclude_none=True)
        status = self.store.objects.get(PIPELINE, {}).get("status", {})
        meta = {"uid": "uid-1", "generation": self.generation, "resourceVersion": "1"}
        self.store.put(PIPELINE, {"metadata": meta, "spec": spec, "status": status})

    def restart(self):
        self.cluster = KubernetesCluster(self.store, ResourceCache(), NoProgress(), NoProbe())

    def look(self):
        with suppress(ClusterError):
            asyncio.run(reconcile(Key("team", "demo"), self.cluster, Settings(), datetime.now(UTC)))

    @property
    def owners(self):
        return [owner["uid"] for owner in self.store.objects[CLAIM]["metadata"]["ownerReferences"]]

    @property
    def ready(self):
        conditions = self.store.objects[PIPELINE]["status"]["conditions"]
        return next(one for one in conditions if one["type"] == "Ready")

    def reads_of_the_claim(self):
        return self.store.read.count(CLAIM)


def test_an_edit_of_when_deleted_is_obeyed_also_when_the_first_try_fails():
    own = Own({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.store.unchangeable["ownerReferences"] = ApiError(0, "the API server does not answer")
    own.look()
    assert own.owners == ["uid-1"]
    own.store.unchangeable.clear()
    own.look()
    assert own.owners == []


def test_an_edit_of_when_deleted_is_obeyed_by_the_next_operator_where_this_one_dies_after_the_status():
    own = Own({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.cluster.apply = None
    with pytest.raises(TypeError):
        own.look()
    assert own.store.objects[PIPELINE]["status"]["observedGeneration"] == own.generation
    own.restart()
    own.look()
    assert own.owners == []


def test_a_claim_that_is_as_it_is_wanted_is_not_read_again_until_somebody_edits_the_pipeline():
    own = Own({}, {"whenDeleted": "Delete"})
    for _ in range(4):
        own.look()
    assert (own.owners, own.reads_of_the_claim()) == (["uid-1"], 1)
    own.edit({"whenDeleted": "Retain"})
    for _ in range(4):
        own.look()
    assert (own.owners, own.reads_of_the_claim()) == ([], 2)


def test_a_refusal_to_keep_the_workspace_is_told_and_tried_once_a_look():
    own = Own({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.store.unchangeable["ownerReferences"] = FORBIDDEN
    for _ in range(3):
        own.look()
    assert own.store.writes.count(f"refuse {CLAIM}") == 3
    assert "workspace.whenDeleted: cannot set an ownerRef" in own.ready["message"]
    own.store.unchangeable.clear()
    own.look()
    own.look()
    assert "whenDeleted" not in own.ready["message"]


def test_a_pipeline_is_not_deleted_while_its_workspace_would_go_with_it_against_its_will():
    own = Own({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    own.store.unchangeable["ownerReferences"] = FORBIDDEN

    async def story():
        pipeline = await own.cluster.read(Key("team", "demo"))
        await own.cluster.observe(pipeline)
        await own.cluster.apply(pipeline, [DeletePipeline()])

    with pytest.raises(ClusterError):
        asyncio.run(story())
    assert PIPELINE in own.store.objects
    own.store.unchangeable.clear()
    own.restart()
    asyncio.run(story())
    assert PIPELINE not in own.store.objects


def test_owners_that_are_not_ours_stay():
    own = Own({"whenDeleted": "Delete"}, {"whenDeleted": "Retain"})
    theirs = {"kind": "Team", "uid": "team"}
    own.store.objects[CLAIM]["metadata"]["ownerReferences"].append(theirs)
    own.look()
    assert own.owners == ["team"]


def size_of(own):
    return own.store.objects[CLAIM]["spec"]["resources"]["requests"]["storage"]


def test_a_workspace_of_which_more_is_asked_grows_and_keeps_what_it_is():
    own = Own({"size": "10Gi", "storageClassName": "fast"}, {"size": "20Gi", "storageClassName": "fast"})
    own.look()
    assert size_of(own) == "20Gi"
    assert own.store.objects[CLAIM]["spec"]["storageClassName"] == "fast"
    assert own.ready["message"] == "suspended, goes on where it stopped"


@pytest.mark.parametrize(("had", "asked"), [("512Gi", "0.5Ti"), ("1Gi", "1073741824"), ("1500m", "1.5"), ("1e3", "1k")])
def test_the_same_size_in_other_words_changes_nothing(had, asked):
    own = Own({}, {"size": asked})
    own.store.objects[CLAIM]["spec"]["resources"]["requests"]["storage"] = had
    own.look()
    assert size_of(own) == had
    assert "size" not in own.ready["message"]


def test_a_storage_class_that_does_not_let_it_grow_is_told_in_its_own_words_until_it_does():
    own = Own({"size": "10Gi"}, {"size": "20Gi", "whenDeleted": "Delete"})
    words = "only dynamically provisioned pvc can be resized"
    own.store.unchangeable["requests"] = ApiError(403, words, "Forbidden")
    own.look()
    own.look()
    assert f"workspace.size: {words}" in own.ready["message"]
    assert own.owners == ["uid-1"], "what else was asked is done"
    own.store.unchangeable.clear()
    own.look()
    own.look()
    assert (size_of(own), "size" in own.ready["message"]) == ("20Gi", False)


@pytest.mark.parametrize(
    ("had", "asked", "words"),
    [
        ({"size": "20Gi"}, {"size": "10Gi"}, "cannot shrink to 10Gi: set it to 20Gi"),
        ({"storageClassName": "fast"}, {"storageClassName": "slow"}, "is of class fast, not slow"),
        ({}, {"accessMode": "ReadWriteMany"}, "has ReadWriteOnce, not ReadWriteMany"),
    ],
)
def test_what_a_claim_cannot_become_is_said_at_once_with_its_mend_and_read_once(had, asked, words):
    own = Own(had, asked)
    own.look()
    assert words in own.ready["message"]
    before = dict(own.store.objects[CLAIM])
    own.look()
    assert own.store.objects[CLAIM] == before
    assert own.reads_of_the_claim() == 1


def test_a_workspace_that_cannot_be_what_is_asked_stops_no_work():
    stage = Scenario().reconcile_until_stable()
    held = Blocker(Reason.VOLUME_NOT_READY, "workspace.size: no")
    observe = stage.cluster.observe

    async def observed(pipeline):
        return replace(await observe(pipeline), workspace_blocker=held)

    stage.cluster.observe = observed
    stage.finish()
    ready = next(one for one in stage.status.conditions if one.type == "Ready")
    assert (ready.status, ready.reason) == ("True", Reason.ALL_STAGES_SUCCEEDED)
    assert "workspace.size: no" in ready.message
