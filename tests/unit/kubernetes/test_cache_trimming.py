"""The books keep what somebody reads of an object, and not its whole length, for every attempt has one of each."""

import json
from copy import deepcopy

from support.pods import a_pod, ended, made_by
from support.scenario import UID, Scenario, a_pipeline

from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.pods.progress import metrics_port
from finetune_operator.kubernetes.resources.job import build_job
from finetune_operator.kubernetes.resources.owner_references import is_owned_by
from finetune_operator.kubernetes.resources.server import build_deployment, serving_of
from finetune_operator.kubernetes.translate.job import observe_job
from finetune_operator.kubernetes.translate.pod import Pod

PIPELINE = Pipeline(Key("team", "demo"), UID, 1, a_pipeline())
LONG = {"managedFields": [{"fieldsV1": "x" * 9_000}]}
APPLIED = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 9_000}
FEW = 3_000
"""Characters of JSON."""


def template_of(stage):
    jobs = Scenario(a_pipeline()).finish().cluster.jobs.values()
    return next(one.template for one in jobs if one.template.stage == stage)


def as_an_api_server_has_it(found):
    found = deepcopy(found)
    found["metadata"] |= {"uid": "u", "creationTimestamp": "2030-01-01T00:00:00Z", **LONG}
    found["metadata"]["annotations"] |= APPLIED
    return found


def length(found):
    return len(json.dumps(found))


def test_of_a_job_and_its_pod_the_books_keep_little_and_lose_nothing_that_is_told_of_the_attempt():
    made = as_an_api_server_has_it(build_job(PIPELINE, template_of("train")))
    container = made["spec"]["template"]["spec"]["containers"][0]
    container["env"] += [{"name": "NOTES", "value": "x" * 9_000}]
    name = made["metadata"]["name"]
    pod = as_an_api_server_has_it(a_pod(ended(75, '{"interruption": {"step": 4, "savedStep": 4}}'), phase="Failed"))
    pod["spec"] = {**made["spec"]["template"]["spec"], "nodeName": "spot-1"}
    pod["metadata"] |= {"labels": made["metadata"]["labels"] | {"batch.kubernetes.io/job-name": name}}
    pod["metadata"] |= {"ownerReferences": [made_by("Job", name)]}
    books = ResourceCache()
    assert books.update_job(made) == books.update_pod(pod) == PIPELINE.key
    kept, seen = books.jobs["team", name], books.pods["team", name]
    assert max(length(kept), length(seen.raw)) < FEW < length(made)
    assert is_owned_by(PIPELINE, kept)
    assert metrics_port(seen) == metrics_port(Pod(pod)) > 0
    assert observe_job(name, kept, seen, None) == observe_job(name, made, Pod(pod), None)


def test_a_server_is_known_by_what_is_kept_of_its_deployment():
    template = template_of("deploy")
    made = as_an_api_server_has_it(build_deployment(PIPELINE, template, template.serving))
    books = ResourceCache()
    books.update_deployment(made)
    [kept] = books.deployments.values()
    assert length(kept) < FEW < length(made)
    assert serving_of(kept) == template.serving
    assert kept["spec"]["replicas"] == made["spec"]["replicas"]
    assert kept["metadata"]["labels"] == made["metadata"]["labels"]


def test_of_a_pipeline_all_is_kept_but_what_kubectl_notes_for_itself():
    found = {"metadata": {"namespace": "team", "name": "demo", "uid": "u", "annotations": {**APPLIED}, **LONG}}
    found |= {"spec": {"workspace": {"existingClaim": "c"}}, "status": {"phase": "Running"}}
    books = ResourceCache()
    books.update_pipeline(found)
    meta = {"namespace": "team", "name": "demo", "uid": "u", "annotations": {}}
    assert books.pipelines[PIPELINE.key] == {**found, "metadata": meta}
