"""What `deploy` leaves running, as the API server is given it, and what is read back."""

import asyncio
from dataclasses import replace

import pytest
from support.pipelines import World, a_pipeline
from support.pods import Object, a_pod, ended, running

from finetune_operator.cluster.kubernetes.answers import Answers
from finetune_operator.cluster.kubernetes.books import Books
from finetune_operator.cluster.kubernetes.refusal import Refusal
from finetune_operator.cluster.kubernetes.server import deployment, service, serving_of, url_of
from finetune_operator.cluster.kubernetes.servers import Servers, not_made
from finetune_operator.observing import JobState
from finetune_operator.pipeline import Key, Pipeline

PIPELINE = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline())


def template_of(**deploy):
    world = World(a_pipeline(deploy=deploy)).finish()
    [template] = [one.template for one in world.cluster.jobs.values() if one.template.stage == "deploy"]
    return template


def written(**deploy) -> Object:
    template = template_of(**deploy)
    return deployment(PIPELINE, template, template.serving)


def containers_of(made):
    pod = made["spec"]["template"]["spec"]
    [verify], [server] = pod["initContainers"], pod["containers"]
    return verify, server


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
    selector = service(PIPELINE, "deploy", made["metadata"]["name"])["spec"]["selector"]
    assert selector.items() <= labels.items()
    assert url_of(PIPELINE) == "http://demo-deploy.team.svc:8000/v1"


def test_what_is_served_is_read_back_from_the_deployment():
    template = template_of()
    assert serving_of(deployment(PIPELINE, template, template.serving)) == template.serving


@pytest.mark.parametrize("target", ["file:///tmp/x", "out/model"])
def test_a_model_on_no_volume_is_refused_with_the_mend(target):
    template = template_of()
    serving = replace(template.serving, model=target)
    with pytest.raises(Refusal, match=r"let push\.target be pvc://"):
        deployment(PIPELINE, template, serving)


def seen(pod: Object, ready: int = 0):
    """Give what the attempt is said to be, of a Deployment with one pod."""
    made = written()
    made["status"] = {"readyReplicas": ready}
    name = made["metadata"]["name"]
    pod["metadata"]["labels"] = {"finetune.dev/server": name}
    books = Books()
    books.note_deployment(made)
    books.note_pod(pod)
    servers = Servers(None, books, Answers(None))  # type: ignore[arg-type]  nothing here asks anybody
    return asyncio.run(servers.seen(PIPELINE, name, None))


def of_init(code: int, message: str) -> Object:
    state = ended(code, message)
    return {"status": {"initContainerStatuses": [{"name": "verify", "state": {}, "lastState": state}]}}


def test_a_server_that_loads_its_model_runs():
    assert seen(a_pod(running())).state is JobState.RUNNING


def test_a_model_that_is_not_what_was_pushed_fails_the_attempt_at_once():
    job = seen(a_pod(None, phase="Pending", **of_init(66, "holds another model")))
    assert (job.state, job.exit_code) == (JobState.FAILED, 66)
    assert "holds another model" in job.message.failure.message


@pytest.mark.parametrize(("restarts", "state"), [(1, JobState.RUNNING), (3, JobState.FAILED)])
def test_a_server_that_ends_again_and_again_has_failed(restarts, state):
    pod = a_pod(running())
    pod["status"]["containerStatuses"][0] |= {"restartCount": restarts, "lastState": ended(1, "no such option")}
    assert seen(pod).state is state


def test_a_server_that_needs_more_memory_is_not_tried_again():
    pod = a_pod(running())
    pod["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": ended(137, reason="OOMKilled")}
    assert seen(pod).out_of_memory


def test_what_keeps_its_pods_from_being_made_is_read_from_the_deployment():
    failed = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: pods=1"}
    assert not_made({"status": {"conditions": [failed]}}) == "exceeded quota: pods=1"
    assert not_made({"status": {"conditions": [{**failed, "status": "False"}]}}) == ""
    assert not_made(None) == ""
