"""What `deploy` leaves running, as the API server is given it, and what is read back."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support.pods import Object, a_pod, ended, made_by, running, unschedulable
from support.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import JobState
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.resources.server import build_deployment, build_service, folder_of, serving_of, url_of
from finetune_operator.kubernetes.servers import Servers, replica_failure
from finetune_operator.kubernetes.translate.api_errors import Blocked

PIPELINE = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline())


def template_of(**deploy):
    scenario = Scenario(a_pipeline(deploy=deploy)).finish()
    [template] = [one.template for one in scenario.cluster.jobs.values() if one.template.stage == "deploy"]
    return template


def written(**deploy) -> Object:
    template = template_of(**deploy)
    return build_deployment(PIPELINE, template, template.serving)


def containers_of(made):
    pod = made["spec"]["template"]["spec"]
    [verify], [server] = pod["initContainers"], pod["containers"]
    return verify, server


@pytest.mark.parametrize(
    ("uri", "folder"), [("pvc://models/a%20b", "/claims/models/a%20b"), ("pvc://models/a?b#c/", "/claims/models/a?b#c")]
)
def test_a_model_is_looked_for_in_the_folder_that_the_trainer_publishes_to(uri, folder):
    assert str(folder_of(uri)) == folder


@pytest.mark.parametrize("uri", ["file://[", "beside/[", "hf://a/b"])
def test_a_place_that_is_on_no_claim_is_refused_whatever_it_looks_like(uri):
    with pytest.raises(Blocked):
        folder_of(uri)


def test_it_serves_the_published_model_from_its_claim_and_cannot_write_there():
    made = written()
    _, server = containers_of(made)
    assert server["command"][:5] == ["python", "-P", "-m", "finetune_trainer.serving", "/claims/models/demo"]
    [claim] = [mount for mount in server["volumeMounts"] if mount["mountPath"] == "/claims/models"]
    assert claim["readOnly"] is True
    assert {"name": "claim-0", "persistentVolumeClaim": {"claimName": "models"}} in made["spec"]["template"]["spec"][
        "volumes"
    ]
    assert server["readinessProbe"]["httpGet"]["path"] == "/health"


def test_every_byte_is_verified_first_against_what_push_said_of_it():
    verify, server = containers_of(written())
    assert verify["command"][-3:] == ["/claims/models/demo", "--digest", "sha256:push"]
    assert verify["image"] == server["image"] == "finetune-trainer"


def test_its_pods_are_what_pod_security_calls_restricted_and_have_no_token():
    made = written()
    pod = made["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in containers_of(made):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_vllm_is_the_same_object_with_another_image_and_other_arguments():
    made = written(engine="vllm", args=["--max-model-len", "4096"], resources={"gpu": {"count": 2}})
    verify, server = containers_of(made)
    assert server["image"].startswith("vllm/vllm-openai:")
    assert verify["image"] == "finetune-trainer"
    assert server["command"][:3] == ["vllm", "serve", "/claims/models/demo"]
    assert server["command"][-2:] == ["--max-model-len", "4096"]
    assert server["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "limits" not in verify["resources"]


def test_a_server_that_is_not_ours_is_told_where_the_model_is():
    _, server = containers_of(written(image="mine:1", command=["serve"], args=["--fast"]))
    assert (server["image"], server["command"]) == ("mine:1", ["serve", "--fast"])
    assert {"name": "FINETUNE_MODEL", "value": "/claims/models/demo"} in server["env"]


def test_the_service_selects_the_pods_of_one_attempt():
    made = written(replicas=3)
    assert made["spec"]["replicas"] == 3
    labels = made["spec"]["template"]["metadata"]["labels"]
    selector = build_service(PIPELINE, "deploy", made["metadata"]["name"])["spec"]["selector"]
    assert selector.items() <= labels.items()
    assert url_of(PIPELINE) == "http://demo-deploy.team.svc:8000/v1"


def test_what_is_served_is_read_back_from_the_deployment():
    template = template_of()
    assert serving_of(build_deployment(PIPELINE, template, template.serving)) == template.serving


@pytest.mark.parametrize("target", ["file:///tmp/x", "out/model"])
def test_a_model_on_no_volume_is_refused_with_the_mend(target):
    template = template_of()
    serving = replace(template.serving, model=target)
    with pytest.raises(Blocked, match=r"let push\.target be pvc://"):
        build_deployment(PIPELINE, template, serving)


NOW = datetime(2030, 1, 1, 0, 10, tzinfo=UTC)


def cluster_of(made: Object, *pods: Object, answers: object = None) -> Servers:
    """Give servers as the books have them; nobody is asked."""
    books, name = ResourceCache(), made["metadata"]["name"]
    books.update_deployment(made)
    for at, pod in enumerate(pods):
        maker = made_by("ReplicaSet", f"{name}-5d")
        meta = {"labels": {"finetune.dev/server": name}, "uid": f"uid-{at}", "ownerReferences": [maker]}
        books.update_pod({**pod, "metadata": {**pod["metadata"], **meta}})
    return Servers(None, books, answers or NoProbe())


def seen(*pods: Object, ready: int = 0, replicas: int = 1):
    """Give what the attempt is said to be."""
    made = written(replicas=replicas)
    made["status"] = {"readyReplicas": ready}
    return asyncio.run(cluster_of(made, *pods).observe_attempt(PIPELINE, made["metadata"]["name"], "", NOW))


def of_init(state: Object, restarts: int = 0) -> Object:
    return {"status": {"initContainerStatuses": [{"name": "verify", "restartCount": restarts, **state}]}}


def test_a_server_that_loads_its_model_runs():
    assert seen(a_pod(running())).state is JobState.RUNNING


def test_a_model_that_is_not_what_was_pushed_fails_the_attempt_at_once():
    job = seen(a_pod(None, phase="Pending", **of_init({"lastState": ended(66, "holds another model")})))
    assert (job.state, job.exit_code) == (JobState.FAILED, 66)
    assert "holds another model" in job.message.failure.message


@pytest.mark.parametrize(("restarts", "state"), [(1, JobState.RUNNING), (3, JobState.FAILED)])
@pytest.mark.parametrize("code", [0, 1])
def test_a_server_that_ends_again_and_again_has_failed(restarts, state, code):
    pod = a_pod(running())
    pod["status"]["containerStatuses"][0] |= {"restartCount": restarts, "lastState": ended(code, "no such option")}
    assert seen(pod).state is state


def test_a_verification_that_breaks_again_and_again_has_failed():
    job = seen(a_pod(None, phase="Pending", **of_init({"lastState": ended(1, "PermissionError")}, restarts=3)))
    assert job.state is JobState.FAILED
    assert "PermissionError" in job.message.failure.message


def test_an_image_that_only_the_verification_needs_and_cannot_have_is_told_of():
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    pod = a_pod({"waiting": {"reason": "PodInitializing"}}, phase="Pending", **of_init(waiting))
    assert seen(pod).blocker.reason is Reason.IMAGE_PULL_FAILED


def test_of_several_replicas_the_one_that_has_no_place_is_told_of():
    placed, homeless = a_pod(running()), a_pod(None, unschedulable("0/3 nodes"), phase="Pending")
    for pods in ((placed, homeless), (homeless, placed)):
        job = seen(*pods, replicas=2, ready=1)
        assert (job.state is JobState.FAILED, job.blocker and job.blocker.reason) in {
            (False, None),
            (False, Reason.WAITING_FOR_CAPACITY),
        }
    ready = a_pod(running(), {"type": "Ready", "status": "True"})
    job = seen(ready, homeless, replicas=2, ready=1)
    assert job.blocker.reason is Reason.WAITING_FOR_CAPACITY


def test_a_deployment_whose_labels_somebody_took_away_is_as_good_as_gone():
    made = written()
    del made["metadata"]["labels"]["finetune.dev/stage"]
    servers = cluster_of(made)
    assert asyncio.run(servers.observe(PIPELINE)) == {}
    assert asyncio.run(servers.observe_attempt(PIPELINE, made["metadata"]["name"], "", NOW)) is None


def test_a_pod_that_only_has_the_labels_is_not_asked():
    made = written()
    name = made["metadata"]["name"]
    books = ResourceCache()
    stranger = a_pod(running())
    stranger["metadata"] |= {"labels": {"finetune.dev/server": name}, "ownerReferences": []}
    books.update_pod(stranger)
    assert list(books.all_pods()) == []


def test_a_server_that_needs_more_memory_is_not_tried_again():
    pod = a_pod(running())
    pod["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": ended(137, reason="OOMKilled")}
    assert seen(pod).out_of_memory


def test_what_keeps_its_pods_from_being_made_is_read_from_the_deployment():
    failed = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: pods=1"}
    assert replica_failure({"status": {"conditions": [failed]}}) == "exceeded quota: pods=1"
    assert replica_failure({"status": {"conditions": [{**failed, "status": "False"}]}}) == ""
    assert replica_failure(None) == ""
