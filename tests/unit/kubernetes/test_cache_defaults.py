"""The defaults of namespaces in the cache: which pipelines a change wakes, and what they then observe."""

import asyncio

from support.operator.cluster_objects import cache_of, pipeline_object
from support.operator.fake_api import FakeApi

from finetune_operator.controller.informers import CHILDREN
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache.cache import DEFAULTS, PIPELINES, ResourceCache
from finetune_operator.kubernetes.cache.change import NO_CHANGE, Change, Urgency
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress

WOKEN = Change((Key("team", "demo"),), Urgency.NOW)
FINISHED = {"finishedAt": "2030-01-01T00:00:00Z", "observedGeneration": 1}


def config_map(text: str, *, version: int, namespace: str = "team") -> dict:
    meta = {
        "namespace": namespace,
        "name": "finetune-defaults",
        "uid": "d",
        "resourceVersion": str(version),
    }
    return {"metadata": meta, "data": {"defaults.yaml": text}}


def of_class(name: str) -> str:
    return f"podDefaults: {{priorityClassName: {name}}}"


def with_pipelines() -> ResourceCache:
    """Return a cache with an unfinished and a finished pipeline, and an unfinished pipeline of another namespace."""
    cache = cache_of(finetunepipelines=[pipeline_object()])
    cache.update(PIPELINES, pipeline_object("done", status=FINISHED))
    cache.update(PIPELINES, pipeline_object("other", namespace="others"))
    done = cache.pipelines.get(("team", "done"))
    assert done
    assert done.finished
    return cache


def priority(cache: ResourceCache) -> str | None:
    return cache.defaults_of("team").defaults.pod_defaults.priority_class_name


def test_change_wakes_unfinished_pipelines_of_its_namespace():
    cache = with_pipelines()
    assert cache.update(DEFAULTS, config_map(of_class("low"), version=2)) == WOKEN
    assert priority(cache) == "low"
    assert cache.update(DEFAULTS, config_map(of_class("low"), version=3)) == NO_CHANGE
    assert cache.update(DEFAULTS, config_map(of_class("old"), version=1)) == NO_CHANGE
    assert cache.update(DEFAULTS, config_map(of_class("high"), version=4)) == WOKEN
    assert priority(cache) == "high"


def test_deletion_wakes_them_and_removes_the_defaults():
    cache = with_pipelines()
    cache.update(DEFAULTS, config_map(of_class("low"), version=2))
    assert cache.remove(DEFAULTS, config_map("", version=3)) == WOKEN
    assert priority(cache) is None


def test_deletion_that_a_watch_missed_is_found_by_a_list():
    cache = with_pipelines()
    cache.update(DEFAULTS, config_map(of_class("low"), version=2))
    assert list(cache.sweep(DEFAULTS, set(), 5, None)) == [WOKEN]
    assert priority(cache) is None


def test_unusable_defaults_are_observed_as_a_blocker():
    cache = with_pipelines()
    cache.update(DEFAULTS, config_map("podDefaults: {colour: red}", version=2))
    cluster = KubernetesCluster(FakeApi(), cache, NoProgress(), NoProbe())
    observed = asyncio.run(cluster.observe(parse_pipeline(pipeline_object())))
    assert observed.defaults_blocker
    assert "podDefaults.colour" in observed.defaults_blocker.message


def test_only_config_maps_of_one_name_are_read():
    _, query = CHILDREN[DEFAULTS]
    assert query == (("fieldSelector", "metadata.name=finetune-defaults"),)
