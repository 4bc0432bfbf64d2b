"""The cache keeps the fields that the operator reads, not whole objects: each attempt has a Job and a pod."""

import json
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from support.operator.cluster_objects import pipeline_object, running_status
from support.operator.pods import a_pod, controller_reference, terminated
from support.operator.scenario import UID, Scenario, a_pipeline

from finetune_operator.core.metadata import IDENTITY, SERVER, STAGE
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.cache.cache import (
    DEPLOYMENTS,
    JOBS,
    PIPELINES,
    PODS,
    ResourceCache,
)
from finetune_operator.kubernetes.cache.trim import claims_of, trim_claim, trim_service
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.pods.progress import metrics_port
from finetune_operator.kubernetes.resources.claim import (
    build_claim,
    immutable_differences,
    pending_changes,
)
from finetune_operator.kubernetes.resources.job import build_job
from finetune_operator.kubernetes.resources.owner_references import is_owned_by
from finetune_operator.kubernetes.resources.server import (
    build_deployment,
    build_service,
    serving_of,
)
from finetune_operator.kubernetes.translate.job import observe_job
from finetune_operator.kubernetes.translate.pod import ObservedPod

PIPELINE = Pipeline(Key("team", "demo"), UID, 1, a_pipeline())
NOW = datetime(2030, 1, 1, tzinfo=UTC)
LONG: dict[str, Any] = {"managedFields": [{"fieldsV1": "x" * 9_000}]}
APPLIED = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 9_000}
MAX_STORED = 3_000
"""Characters of JSON."""


def template_of(stage):
    jobs = Scenario(a_pipeline()).finish().cluster.jobs.values()
    return next(job.template for job in jobs if job.template.stage == stage)


def as_received(result):
    """Return the object with the fields that an API server and kubectl add."""
    result = deepcopy(result)
    result["metadata"] |= {
        "uid": "u",
        "creationTimestamp": "2030-01-01T00:00:00Z",
        **LONG,
    }
    result["metadata"]["annotations"] |= APPLIED
    return result


def length(result):
    return len(json.dumps(result))


def test_trimmed_job_and_pod_give_the_same_observation():
    job = as_received(build_job(PIPELINE, template_of("train")))
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["env"] += [{"name": "NOTES", "value": "x" * 9_000}]
    container["resources"] = {
        "requests": {"cpu": "2"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "1"},
    }
    name = job["metadata"]["name"]
    pod = as_received(
        a_pod(
            terminated(75, '{"interruption": {"step": 4, "savedStep": 4}}'),
            phase="Failed",
        )
    )
    pod["spec"] = {**job["spec"]["template"]["spec"], "nodeName": "spot-1"}
    pod["metadata"] |= {
        "labels": job["metadata"]["labels"] | {"batch.kubernetes.io/job-name": name}
    }
    pod["metadata"] |= {"ownerReferences": [controller_reference("Job", name)]}
    cache = ResourceCache()
    cache.update(JOBS, job)
    status = running_status(name)
    cache.update(PIPELINES, pipeline_object(status=status))
    cache.update(PODS, pod)
    stored_job = cache.jobs.get(("team", name))
    [stored_pod] = cache.pods_of("team", name)
    assert max(length(stored_job), length(stored_pod.raw)) < MAX_STORED < length(job)
    assert stored_job
    assert is_owned_by(PIPELINE, stored_job)
    assert metrics_port(stored_pod) == metrics_port(ObservedPod(pod)) > 0
    assert observe_job(name, stored_job, [stored_pod], NOW) == observe_job(
        name, job, [ObservedPod(pod)], NOW
    )


def test_trimmed_deployment_keeps_serving_replicas_and_labels():
    template = template_of("deploy")
    deployment = as_received(build_deployment(PIPELINE, template, template.serving))
    cache = ResourceCache()
    cache.update(DEPLOYMENTS, deployment)
    stored = cache.deployments.get(("team", template.name))
    assert length(stored) < MAX_STORED < length(deployment)
    assert stored
    assert serving_of(stored) == template.serving
    assert stored["spec"]["replicas"] == deployment["spec"]["replicas"]
    for name in (SERVER, STAGE, IDENTITY):
        assert (
            stored["metadata"]["labels"][name] == deployment["metadata"]["labels"][name]
        )


def test_trimmed_pipeline_lacks_only_metadata_of_other_programs():
    result = pipeline_object(
        claim="c", status={"phase": "Running"}, annotations={**APPLIED}, **LONG
    )
    cache = ResourceCache()
    cache.update(PIPELINES, result)
    stored = cache.pipelines.get(("team", "demo"))
    assert stored
    assert parse_pipeline(stored.content()) == replace(
        parse_pipeline(result), annotations={}
    )
    assert "x" * 100 not in json.dumps(stored.content())


def test_trimmed_claim_and_service_keep_what_is_compared():
    claim = as_received(build_claim(PIPELINE))
    stored = trim_claim(claim)
    assert (
        list(pending_changes(PIPELINE, stored))
        == list(pending_changes(PIPELINE, claim))
        == []
    )
    assert (
        list(immutable_differences(PIPELINE, stored))
        == list(immutable_differences(PIPELINE, claim))
        == []
    )
    service = as_received(build_service(PIPELINE, "deploy", "demo-deploy-a1"))
    assert trim_service(service)["spec"]["selector"] == service["spec"]["selector"]
    assert max(length(stored), length(trim_service(service))) < MAX_STORED


def test_claims_are_those_that_a_pod_can_write_to():
    volumes = [
        {"persistentVolumeClaim": {"claimName": "b"}},
        {"persistentVolumeClaim": {"claimName": "a", "readOnly": False}},
        {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        {"emptyDir": {}},
    ]
    assert claims_of({"volumes": volumes}) == ["a", "b"]
    assert claims_of({}) == []
