"""The claim that holds a pipeline's work: whose turn it is, and what an edit of it does."""

import asyncio
from dataclasses import replace

import pytest
from support.pipelines import World, a_pipeline
from support.pods import over
from support.store import Store

from finetune_operator.api.conditions import Reason
from finetune_operator.cluster.kubernetes.answers import NoAnswers
from finetune_operator.cluster.kubernetes.books import Books
from finetune_operator.cluster.kubernetes.cluster import KubernetesCluster
from finetune_operator.cluster.kubernetes.progress import NoPages
from finetune_operator.errors import ClusterError
from finetune_operator.pipeline import Key, Pipeline
from finetune_operator.planning import CreateJob

CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
JOBS = "/apis/batch/v1/namespaces/team/jobs"


class Sharing:
    """Two pipelines that were told to work on one claim."""

    def __init__(self):
        self.store, self.books = Store(), Books()
        self.store.put(f"{CLAIMS}/shared", {})
        self.cluster = KubernetesCluster(self.store, self.books, NoPages(), NoAnswers())
        self.pipelines = {name: self.submit(name, born) for name, born in (("older", "2030"), ("younger", "2031"))}

    def submit(self, name, born):
        spec = a_pipeline(workspace={"existingClaim": "shared"})
        self.tell(name, born)
        return Pipeline(Key("team", name), f"uid-{name}", 1, spec)

    def tell(self, name, born, **status):
        meta = {"namespace": "team", "name": name, "uid": f"uid-{name}", "creationTimestamp": born}
        spec = {"workspace": {"existingClaim": "shared"}}
        self.books.note_pipeline({"metadata": meta, "spec": spec, "status": status})

    async def begin(self, name):
        world = World(self.pipelines[name].spec, name=name).settle()
        [job] = world.cluster.jobs.values()
        template = replace(job.template, name=f"{name}-prepare-a1")
        try:
            await self.cluster.apply(self.pipelines[name], [CreateJob(template)])
        except ClusterError:
            observed = await self.cluster.observe(self.pipelines[name])
            return observed.refused[template.name].reason
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
    sharing.books.note_job({**job, "status": {"conditions": [over("Failed")]}})
    assert asyncio.run(sharing.begin("older")) is None


@pytest.mark.parametrize(("made", "reason"), [("2031-01-01T00:00:00Z", Reason.WORKSPACE_IN_USE), (None, None)])
def test_an_attempt_whose_job_was_seen_holds_the_claim_and_one_that_only_has_a_number_does_not(sharing, made, reason):
    attempt = {"number": 1, "outcome": "Running", **({"createdAt": made} if made else {})}
    sharing.tell("younger", "2031", stages={"train": {"attempts": [attempt]}})
    assert asyncio.run(sharing.begin("older")) is reason


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
