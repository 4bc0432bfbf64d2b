"""Training on several nodes on Kubernetes: its Job, its headless Service, its claim, and what the cache says of it."""

import asyncio

import pytest
from support.operator.cluster_objects import (
    PIPELINE_NAME,
    cache_of,
    job_of,
    pipeline_object,
    pod_of,
    running_status,
)
from support.operator.fake_api import FakeApi
from support.operator.pods import running, terminated
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.metadata import (
    headless_service_name,
    job_name,
    service_name,
)
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.planning.actions import CreateJob
from finetune_operator.kubernetes.cache.cache import JOBS, PODS
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources.claim import build_claim, sharing_error
from finetune_operator.kubernetes.resources.headless_service import (
    build_headless_service,
)
from finetune_operator.kubernetes.resources.job import build_job
from finetune_trainer.contract import Environment

SHARED = {"workspace": {"accessMode": "ReadWriteMany"}}
SERVICE = "/api/v1/namespaces/team/services/demo-train"
JOB = "demo-train-a1"
INDEX = "batch.kubernetes.io/job-completion-index"


def gpus(count):
    return {"resources": {"limits": {"nvidia.com/gpu": count}}}


def pipeline_of(**train):
    return Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline(**SHARED, train=train))


def template_of(pipeline):
    jobs = Scenario(pipeline.spec).run_before("train").cluster.jobs.values()
    return next(job.template for job in jobs if job.template.stage == "train")


def job_with(**train):
    pipeline = pipeline_of(**train)
    return build_job(pipeline, template_of(pipeline))


def container_of(job):
    [container] = job["spec"]["template"]["spec"]["containers"]
    return container


def env_of(job):
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom"))
        for variable in container_of(job)["env"]
    }


# The Job.


def test_several_nodes_are_one_indexed_job():
    job = job_with(nodes=3)
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == (
        "Indexed",
        3,
        3,
    )
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["podFailurePolicy"] == job_with()["spec"]["podFailurePolicy"]
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_job_of_one_node_is_that_of_one_pod():
    job = job_with()
    assert job_with(nodes=1) == job
    assert {"completionMode", "successPolicy"}.isdisjoint(job["spec"])
    assert "subdomain" not in job["spec"]["template"]["spec"]
    assert {"FINETUNE_NODE_RANK", "FINETUNE_MASTER_ADDRESS"}.isdisjoint(env_of(job))
    assert [
        volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]
    ] == [
        "workspace",
        "tmp",
    ]


def test_pods_know_their_index_and_the_first_one():
    pipeline = pipeline_of(nodes=2)
    job = build_job(pipeline, template_of(pipeline))
    env = env_of(job)
    service = build_headless_service(pipeline, "train")
    assert env.pop("FINETUNE_NODE_RANK") == {
        "fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}
    }
    assert (
        job["spec"]["template"]["spec"]["subdomain"]
        == service["metadata"]["name"]
        == "demo-train"
    )
    environment = Environment.read({**env, "FINETUNE_NODE_RANK": "1"})
    assert (environment.node_rank, environment.master_address) == (
        1,
        f"{job['metadata']['name']}-0.demo-train",
    )


def test_service_names_pods_before_they_are_ready():
    pipeline = pipeline_of(nodes=2)
    service = build_headless_service(pipeline, "train")
    labels = build_job(pipeline, template_of(pipeline))["spec"]["template"]["metadata"][
        "labels"
    ]
    assert (
        service["spec"]["clusterIP"],
        service["spec"]["publishNotReadyAddresses"],
    ) == (
        "None",
        True,
    )
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"] == [{"name": "rendezvous", "port": 29500}]
    assert [owner["uid"] for owner in service["metadata"]["ownerReferences"]] == [
        "uid-1"
    ]


def shared_memory_of(job):
    """Return the volumes at /dev/shm, of which a pod has at most one."""
    volumes = {
        volume["name"]: volume for volume in job["spec"]["template"]["spec"]["volumes"]
    }
    return [
        volumes[mount["name"]]["emptyDir"]
        for mount in container_of(job)["volumeMounts"]
        if mount["mountPath"] == "/dev/shm"
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, []),
        ({"pod": gpus(1)}, [{"medium": "Memory"}]),
        ({"pod": gpus(4)}, [{"medium": "Memory"}]),
        ({"nodes": 2}, [{"medium": "Memory"}]),
        ({"processesPerNode": 2}, [{"medium": "Memory"}]),
        (
            {"pod": {"sharedMemory": "8Gi"}},
            [{"medium": "Memory", "sizeLimit": "8Gi"}],
        ),
        (
            {"pod": gpus(1) | {"sharedMemory": "8Gi"}},
            [{"medium": "Memory", "sizeLimit": "8Gi"}],
        ),
    ],
    ids=str,
)
def test_pods_with_gpus_or_several_processes_share_memory(spec, expected):
    """Data loaders and NCCL use /dev/shm, and a container runtime gives it 64 MiB."""
    assert shared_memory_of(job_with(**spec)) == expected


def test_accelerators_are_in_the_environment():
    assert env_of(job_with(pod=gpus(4)))["FINETUNE_GPUS"] == "4"


@pytest.mark.parametrize("pods", [2, 10, 11, 64])
def test_host_names_of_all_pods_have_at_most_63_characters(pods):
    name = job_name("p" * 100, "0f1e2d3c-4b5a", "train", 12, pods)
    assert len(f"{name}-{pods - 1}") == 63
    assert job_name("demo", "0f1e2d3c-4b5a", "train", 1, pods) == job_name(
        "demo", "0f1e2d3c-4b5a", "train", 1
    )


def test_services_of_a_pipeline_have_their_own_names():
    names = {
        service_name("a.b"),
        headless_service_name("a.b", "train"),
        headless_service_name("a-b", "train"),
    }
    assert len(names) == 3
    assert max(map(len, (headless_service_name("x" * 253, "train"), *names))) <= 63


# The Service.


class EmptyCluster:
    """A cluster without objects, and the action that creates the Job of two nodes."""

    def __init__(self):
        self.pipeline = pipeline_of(nodes=2)
        self.api = FakeApi()
        self.cluster = KubernetesCluster(self.api, cache_of(), NoProgress(), NoProbe())
        self.template = template_of(self.pipeline)

    def create(self):
        return asyncio.run(
            self.cluster.apply(self.pipeline, [CreateJob(self.template)])
        )


def test_service_is_created_before_the_job_and_once():
    env = EmptyCluster()
    assert env.create() == {}
    env.api.objects = {
        path: result for path, result in env.api.objects.items() if "/jobs/" not in path
    }
    assert env.create() == {}
    created = [
        line.split()[1].rpartition("/")[2]
        for line in env.api.writes
        if line.startswith("create")
    ]
    assert created == ["demo-train", env.template.name, env.template.name]


def test_service_that_the_cache_does_not_show_is_used():
    env = EmptyCluster()
    env.api.put(SERVICE, build_headless_service(env.pipeline, "train"))
    assert env.create() == {}
    assert any(env.template.name in path for path in env.api.objects)


def test_foreign_service_stops_the_attempt_and_stays():
    env = EmptyCluster()
    env.api.put(SERVICE, {"spec": {"selector": {"app": "foreign"}}})
    refused = env.create()[env.template.name]
    assert (refused.reason, "delete it, or rename the pipeline" in refused.message) == (
        Reason.DEPENDENCY_NOT_READY,
        True,
    )
    assert env.api.objects[SERVICE]["spec"]["selector"] == {"app": "foreign"}
    assert not any("/jobs/" in path for path in env.api.objects)


# The claim.


@pytest.mark.parametrize(
    ("mode", "nodes", "error"),
    [("ReadWriteOnce", 2, True), ("ReadWriteMany", 2, False)],
)
def test_claim_of_several_nodes_must_be_shared(mode, nodes, error):
    pipeline = pipeline_of(nodes=nodes)
    result = build_claim(pipeline)
    result["spec"]["accessModes"] = [mode]
    message = sharing_error(pipeline, result)
    assert (message is not None) is error
    assert (
        message is None
        or "has ReadWriteOnce, and train runs on 2 nodes, which need ReadWriteMany"
        in message
    )
    assert sharing_error(pipeline_of(), result) is None


# The cache.


def indexed_job(*conditions, version=2):
    job = job_of("demo", "train", *conditions, version=version)
    job["spec"]["completions"] = 2
    return job


def pod_with(index, state, phase, version, **more):
    labels = {"batch.kubernetes.io/job-name": JOB, INDEX: str(index)}
    pod = pod_of(
        state=state,
        version=version,
        name=f"{JOB}-{index}",
        uid=f"u{index}",
        labels=labels,
        **more,
    )
    pod["status"]["phase"] = phase
    return pod


def training():
    pipeline = pipeline_object(version=1, status=running_status(JOB))
    pods = [pod_with(index, running(), "Running", 3 + index) for index in range(2)]
    return cache_of(finetunepipelines=[pipeline], jobs=[indexed_job()], pods=pods)


def test_job_is_over_when_all_pods_ended_and_the_first_succeeded():
    cache = training()
    job = cache.jobs.get(("team", JOB))
    cache.update(PODS, pod_with(0, terminated(0, "{}", "Completed"), "Succeeded", 10))
    assert not cache.is_over(job)
    assert cache.writers("team", "demo-workspace")
    cache.update(PODS, pod_with(1, terminated(143), "Failed", 11))
    assert cache.is_over(job)
    assert cache.writers("team", "demo-workspace") == []


def test_job_with_a_failed_first_pod_is_not_over():
    """The Job controller says when: its condition has the evidence."""
    cache = training()
    for index in range(2):
        cache.update(PODS, pod_with(index, terminated(75), "Failed", 10 + index))
    assert not cache.is_over(cache.jobs.get(("team", JOB)))


def test_end_of_each_deleted_pod_is_kept():
    cache = training()
    for index in range(2):
        cache.update(PODS, pod_with(index, terminated(75), "Failed", 10 + index))
        cache.remove(PODS, pod_with(index, running(), "Running", 20 + index))
    assert [
        (pod.index, pod.gone, pod.exit_code) for pod in cache.pods_of("team", JOB)
    ] == [
        (0, True, 75),
        (1, True, 75),
    ]


def test_pods_are_the_youngest_of_each_index_in_order():
    cache = training()
    younger = pod_with(
        0, running(), "Running", 10, creationTimestamp="2030-01-01T00:01:00Z"
    )
    younger["metadata"] |= {"name": "younger", "uid": "u9"}
    cache.update(PODS, younger)
    assert [pod.name for pod in cache.pods_of("team", JOB)] == ["younger", f"{JOB}-1"]


def test_attempt_is_read_again_where_a_pod_is_missing():
    """The Job has failed, and the watch of pods has not shown one of them yet."""
    env = EmptyCluster()
    name = env.template.name
    pipeline = env.pipeline
    attempt = {
        "number": 1,
        "job": name,
        "identity": "i",
        "execution": "e",
        "createdAt": "2030-01-01T00:00:00Z",
    }
    status = {
        "stages": [{"name": "train", "attempts": [attempt | {"outcome": "Running"}]}]
    }
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "message": "",
    }
    owner = [{"kind": "FineTunePipeline", "name": "demo", "uid": "uid-1"}]
    meta = {
        "namespace": "team",
        "name": name,
        "uid": "ju",
        "resourceVersion": "5",
        "ownerReferences": owner,
    }
    env.cluster.cache.update(
        JOBS,
        {
            "metadata": meta | {"annotations": {PIPELINE_NAME: "demo"}},
            "spec": {"completions": 2, "template": {"spec": {}}},
            "status": {"conditions": [failed]},
        },
    )
    for index in range(2):
        labels = {"batch.kubernetes.io/job-name": name, INDEX: str(index)}
        refs = [{"kind": "Job", "name": name, "uid": "ju", "controller": True}]
        pod = pod_of(
            state=terminated(75),
            name=f"{name}-{index}",
            uid=f"u{index}",
            labels=labels,
            ownerReferences=refs,
        )
        env.api.put(f"/api/v1/namespaces/team/pods/{name}-{index}", pod)
    known = pipeline.status.model_validate(status)
    observed = asyncio.run(
        env.cluster.observe_children(
            Pipeline(pipeline.key, "uid-1", 1, pipeline.spec, known)
        )
    )
    assert (observed.jobs[name].state, observed.jobs[name].exit_code) == ("Failed", 75)
