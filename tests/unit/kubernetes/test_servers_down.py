"""The metric `finetune_servers_down`: what the cache knows from Services and Deployments."""

import pytest
from support.operator.cluster_objects import cache_of, pipeline_object
from support.operator.scenario import Scenario

from finetune_operator.kubernetes.cache.totals import servers_down
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.resources.server import (
    build_deployment,
    build_service,
)

FOUND = pipeline_object(status={"phase": "Running"})
PIPELINE = parse_pipeline(FOUND)
[TEMPLATE] = [
    job.template
    for job in Scenario().finish().cluster.jobs.values()
    if job.template.stage == "deploy"
]


def deployment(ready):
    assert TEMPLATE.serving
    return build_deployment(PIPELINE, TEMPLATE, TEMPLATE.serving) | {
        "status": {"readyReplicas": ready}
    }


def service(server=TEMPLATE.name, owner=PIPELINE.uid):
    built = build_service(PIPELINE, "deploy", server)
    built["metadata"]["ownerReferences"][0]["uid"] = owner
    return built


@pytest.mark.parametrize(
    ("services", "deployments", "count"),
    [
        ([], [], 0),
        ([], [deployment(0)], 0),
        ([service()], [deployment(1)], 0),
        ([service()], [deployment(0)], 1),
        ([service()], [], 1),
        ([service("demo-deploy-a9")], [deployment(1)], 1),
        ([service(owner="another")], [deployment(0)], 0),
    ],
    ids=[
        "no server",
        "server has not answered",
        "server is ready",
        "no ready pod",
        "no Deployment",
        "only a server without traffic is ready",
        "foreign Service",
    ],
)
def test_server_with_traffic_and_no_ready_pod_is_down(services, deployments, count):
    """A pipeline that runs again has the phase Running, while its earlier server has the traffic."""
    cache = cache_of(
        finetunepipelines=[FOUND], services=services, deployments=deployments
    )
    assert servers_down(cache) == count


def test_service_without_a_selector_has_no_server():
    built = service() | {"spec": {}}
    assert servers_down(cache_of(finetunepipelines=[FOUND], services=[built])) == 0
