"""Build the Deployment and Service of `deploy`, and observe the attempt from them."""

from dataclasses import replace

import pytest
from support.operator.pods import (
    Object,
)
from support.operator.server_objects import PIPELINE, deployment_of, template_of

from finetune_operator.kubernetes.resources.server import (
    build_deployment,
    build_service,
    folder_of,
    serving_of,
    url_of,
)
from finetune_operator.kubernetes.translate.api_errors import Blocked

TWO_GPUS = {"resources": {"limits": {"nvidia.com/gpu": 2}}}


def containers_of(deployment):
    pod = deployment["spec"]["template"]["spec"]
    [verify] = pod["initContainers"]
    [server] = pod["containers"]
    return verify, server


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("pvc://models/a%20b", "/claims/models/a%20b"),
        ("pvc://models/a?b#c/", "/claims/models/a?b#c"),
    ],
)
def test_model_folder_is_where_the_trainer_publishes(uri, folder):
    assert str(folder_of(uri)) == folder


@pytest.mark.parametrize("uri", ["file://[", "folder/["])
def test_model_on_another_machine_is_blocked(uri):
    with pytest.raises(Blocked):
        folder_of(uri)


def test_server_mounts_the_published_model_read_only():
    deployment = deployment_of()
    _, server = containers_of(deployment)
    assert server["command"][:5] == [
        "python",
        "-P",
        "-m",
        "finetune_trainer.serving",
        "/claims/models/demo",
    ]
    [claim] = [
        mount
        for mount in server["volumeMounts"]
        if mount["mountPath"] == "/claims/models"
    ]
    assert claim["readOnly"] is True
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert {
        "name": "claim-0",
        "persistentVolumeClaim": {"claimName": "models", "readOnly": True},
    } in volumes


def test_init_container_verifies_the_digest_of_push():
    verify, server = containers_of(deployment_of())
    assert verify["command"][-3:] == ["/claims/models/demo", "--digest", "sha256:push"]
    assert verify["image"] == server["image"] == "finetune-trainer-cpu"


def test_pods_meet_restricted_pod_security_and_have_no_token():
    deployment = deployment_of()
    pod = deployment["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in containers_of(deployment):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_vllm_server_has_its_image_command_and_gpus():
    deployment = deployment_of(
        engine="VLLM", pod={"args": ["--max-model-len", "4096"], **TWO_GPUS}
    )
    verify, server = containers_of(deployment)
    assert server["image"].startswith("vllm/vllm-openai:")
    assert verify["image"] == "finetune-trainer-cpu"
    assert server["command"][:3] == ["vllm", "serve", "/claims/models/demo"]
    assert server["command"][-2:] == ["--max-model-len", "4096"]
    assert server["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "limits" not in verify["resources"]


def test_server_has_shared_memory_only_with_gpus():
    volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    with_gpus = deployment_of(engine="VLLM", pod=TWO_GPUS)
    verify, server = containers_of(with_gpus)
    assert volume in with_gpus["spec"]["template"]["spec"]["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in server["volumeMounts"]
    assert "shm" not in {mount["name"] for mount in verify["volumeMounts"]}
    without = deployment_of()
    assert volume not in without["spec"]["template"]["spec"]["volumes"]
    assert "shm" not in {
        mount["name"] for mount in containers_of(without)[1]["volumeMounts"]
    }


def test_probes_restart_a_hanging_server_not_a_loading_one():
    _, server = containers_of(deployment_of())
    probes = {
        name: server[f"{name}Probe"] for name in ("startup", "readiness", "liveness")
    }
    assert {probe["httpGet"]["path"] for probe in probes.values()} == {"/health"}
    seconds = {
        name: probe["periodSeconds"] * probe.get("failureThreshold", 3)
        for name, probe in probes.items()
    }
    assert seconds["startup"] > 100 * 365 * 24 * 3600
    assert seconds["liveness"] == 300
    assert seconds["readiness"] == 6
    assert all(
        probe["failureThreshold"] <= 2**31 - 1
        for probe in probes.values()
        if "failureThreshold" in probe
    )


def test_custom_server_gets_the_model_folder_in_its_env():
    _, server = containers_of(
        deployment_of(
            pod={
                "image": "mine:1",
                "command": ["serve"],
                "args": ["--fast"],
            }
        )
    )
    assert server["image"] == "mine:1"
    assert server["command"] == ["serve", "--fast"]
    assert {"name": "FINETUNE_MODEL", "value": "/claims/models/demo"} in server["env"]


def test_service_selects_the_pods_of_one_attempt():
    deployment = deployment_of(replicas=3)
    assert deployment["spec"]["replicas"] == 3
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selector = build_service(PIPELINE, "deploy", deployment["metadata"]["name"])[
        "spec"
    ]["selector"]
    assert selector.items() <= labels.items()
    assert url_of(PIPELINE) == "http://demo-deploy.team.svc:8000/v1"


DIGEST = f"sha256:{'0' * 64}"


def built(uri: str, *, image_volumes: bool) -> tuple[Object, Object, Object]:
    """Return the pod, its init container and its server for a model at this place."""
    template = template_of()
    serving = replace(template.serving, model=uri, digest=DIGEST)
    deployment = build_deployment(
        PIPELINE, template, serving, image_volumes=image_volumes
    )
    return deployment["spec"]["template"]["spec"], *containers_of(deployment)


def mount_at(container: Object, path: str) -> Object:
    [result] = [
        mount for mount in container["volumeMounts"] if mount["mountPath"] == path
    ]
    return result


def test_image_is_mounted_where_the_cluster_can():
    uri = f"oci://registry.example:5000/team/bot@{DIGEST}"
    pod, verify, server = built(uri, image_volumes=True)
    image = {"reference": uri.removeprefix("oci://"), "pullPolicy": "IfNotPresent"}
    assert {"name": "model", "image": image} in pod["volumes"]
    for container in (verify, server):
        assert mount_at(container, "/models/bot") == {
            "name": "model",
            "mountPath": "/models/bot",
            "subPath": "models",
            "readOnly": True,
        }
    assert "--fetch" not in verify["command"]
    assert "envFrom" not in verify


@pytest.mark.parametrize(
    ("uri", "image_volumes", "folder"),
    [
        (f"oci://registry.example/team/bot@{DIGEST}", False, "/models/bot"),
        (
            "oci://registry.example/team/bot:v1",
            True,
            "/models/bot",
        ),  # a tag may move between two replicas
        (f"s3://models/team/bot/sha256-{'0' * 64}", True, "/models/bot"),
        ("hf://team/bot@4711", True, "/models/bot"),
    ],
)
def test_model_of_a_store_is_downloaded_and_verified(uri, image_volumes, folder):
    pod, verify, server = built(uri, image_volumes=image_volumes)
    assert {"name": "model", "emptyDir": {}} in pod["volumes"]
    assert verify["command"][4:] == [folder, "--digest", DIGEST, "--fetch", uri]
    assert verify["envFrom"] == server["envFrom"]
    assert mount_at(verify, folder) == {"name": "model", "mountPath": folder}
    assert mount_at(server, folder)["readOnly"] is True


def test_serving_round_trips_through_the_annotation():
    template = template_of()
    assert (
        serving_of(build_deployment(PIPELINE, template, template.serving))
        == template.serving
    )


@pytest.mark.parametrize("target", ["file:///tmp/x", "out/model"])
def test_blocked_model_message_names_the_fix(target):
    template = template_of()
    serving = replace(template.serving, model=target)
    with pytest.raises(
        Blocked, match=r"add a target such as pvc://CLAIM/folder to push\.targets"
    ):
        build_deployment(PIPELINE, template, serving)
