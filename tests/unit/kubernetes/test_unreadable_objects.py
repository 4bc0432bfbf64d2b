"""Objects that this version of the operator cannot read: their status, their Event, and newer CRDs."""

import asyncio
from typing import Any

import pytest
from support.operator.cluster_objects import pipeline_object
from support.operator.fake_api import FakeApi
from support.operator.kstatus import kstatus_of
from support.operator.scenario import merged

from finetune_operator.api.conditions import READY
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.status import PipelineStatus
from finetune_operator.errors import InvalidObject, NewerObject
from finetune_operator.kubernetes.cache.cache import PIPELINES, ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress

PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"


class OnePipeline:
    """A cluster with one pipeline and nothing else."""

    def __init__(self):
        self.api = FakeApi()
        cache = ResourceCache()
        stored = self.api.put(PIPELINE, pipeline_object())
        cache.update(PIPELINES, stored)
        self.pipeline = parse_pipeline(stored)
        self.cluster = KubernetesCluster(self.api, cache, NoProgress(), NoProbe())


@pytest.fixture
def env():
    return OnePipeline()


def test_unreadable_object_is_stalled_for_kstatus(env):
    """Its observedGeneration equals the object's, or kstatus would not read Stalled; finishedAt is another spec's."""
    before = env.api.objects[PIPELINE]
    env.api.put(
        PIPELINE,
        {
            **before,
            "status": {
                **before.get("status", {}),
                "finishedAt": "2030-01-01T00:00:00Z",
            },
        },
    )
    asyncio.run(
        env.cluster.mark_invalid(env.pipeline.key, InvalidObject("train: nonsense"))
    )
    raw = env.api.objects[PIPELINE]
    status = PipelineStatus.model_validate(raw["status"])
    assert kstatus_of({"apiVersion": API_VERSION, "kind": KIND, **raw}) == "Failed"
    assert status.phase == "Failed"
    assert status.finished_at is None


def test_conditions_without_their_fields_are_replaced(env):
    """They have no schema: any account that may write a status may write them."""
    before = env.api.objects[PIPELINE]
    env.api.put(PIPELINE, {**before, "status": {"conditions": [{"type": READY}, {}]}})
    asyncio.run(
        env.cluster.mark_invalid(env.pipeline.key, InvalidObject("status: nonsense"))
    )
    status = PipelineStatus.model_validate(env.api.objects[PIPELINE]["status"])
    [ready] = [condition for condition in status.conditions if condition.type == READY]
    assert ready.message.startswith("status: nonsense")


def test_unreadable_object_is_told_once_for_each_generation(env):
    for generation in (1, 1, 2):
        env.api.objects[PIPELINE]["metadata"]["generation"] = generation
        asyncio.run(
            env.cluster.mark_invalid(env.pipeline.key, InvalidObject("train: nonsense"))
        )
    assert env.api.writes == [f"patch {PIPELINE}/status"] * 2
    message = "train: nonsense (see docs/guides/troubleshooting.md#specinvalid)"
    events = env.cluster.events.waiting["team"]
    assert [(event["type"], event["reason"], event["message"]) for event in events] == [
        ("Warning", "PipelineFailed", message)
    ] * 2
    assert {event["involvedObject"]["uid"] for event in events} == {env.pipeline.uid}
    assert len({event["metadata"]["name"] for event in events}) == 2


NEWER = {"spec": {"train": {"optimizer": {"sharpness": 0.5}}}}


def error_of(raw: dict[str, Any], changes: dict[str, Any]) -> InvalidObject:
    with pytest.raises(InvalidObject) as raised:
        parse_pipeline(merged(raw, changes))
    return raised.value


def test_pipeline_of_a_newer_crd_is_in_progress(env):
    """During an upgrade, the new CRD's defaults appear in every object before the new operator starts."""
    error = error_of(env.api.objects[PIPELINE], NEWER)
    assert isinstance(error, NewerObject)
    asyncio.run(env.cluster.mark_invalid(env.pipeline.key, error))
    raw = env.api.objects[PIPELINE]
    assert kstatus_of({"apiVersion": API_VERSION, "kind": KIND, **raw}) == "InProgress"
    assert "sharpness: Extra inputs" in raw["status"]["conditions"][0]["message"]
    assert (
        "the CRD is newer than this operator: upgrade it"
        in raw["status"]["conditions"][0]["message"]
    )
    assert env.cluster.events.waiting == {}


def test_finished_pipeline_of_a_newer_crd_keeps_its_status(env):
    status = {
        "finishedAt": "2030-01-01T00:00:00Z",
        "observedGeneration": 1,
        "phase": "Succeeded",
    }
    env.api.put(PIPELINE, {**env.api.objects[PIPELINE], "status": status})
    asyncio.run(
        env.cluster.mark_invalid(
            env.pipeline.key, error_of(env.api.objects[PIPELINE], NEWER)
        )
    )
    assert env.api.objects[PIPELINE]["status"] == status


@pytest.mark.parametrize("newer", [True, False], ids=["newer field", "new rule"])
def test_unchanged_spec_stays_the_one_that_the_stages_describe(env, newer):
    """A newer CRD's default, or a new rule, is no edit: the next operator goes on with the stages."""
    status = {"observedGeneration": 1, "observedVersion": "before", "phase": "Running"}
    env.api.put(PIPELINE, {**env.api.objects[PIPELINE], "status": status})
    error = InvalidObject("train: no")
    if newer:
        error = error_of(env.api.objects[PIPELINE], NEWER)
    for _ in range(2):
        asyncio.run(env.cluster.mark_invalid(env.pipeline.key, error))
    assert env.api.objects[PIPELINE]["status"]["observedVersion"] == "before"
    env.api.objects[PIPELINE]["metadata"]["generation"] = 2
    for _ in range(2):
        asyncio.run(env.cluster.mark_invalid(env.pipeline.key, error))
    assert env.api.objects[PIPELINE]["status"]["observedVersion"] == "unread"


def test_finished_pipeline_keeps_its_status_under_a_new_rule(env):
    status = {
        "finishedAt": "2030-01-01T00:00:00Z",
        "observedGeneration": 1,
        "phase": "Succeeded",
    }
    env.api.put(PIPELINE, {**env.api.objects[PIPELINE], "status": status})
    error = InvalidObject("push.placement: no")
    asyncio.run(env.cluster.mark_invalid(env.pipeline.key, error))
    assert env.api.objects[PIPELINE]["status"] == status
    assert env.cluster.events.waiting == {}


def test_wrong_value_beside_a_newer_field_is_invalid(env):
    wrong = merged(NEWER, {"spec": {"seed": -1}})
    assert not isinstance(error_of(env.api.objects[PIPELINE], wrong), NewerObject)
