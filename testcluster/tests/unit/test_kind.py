"""The provider kind: its configuration, and its verbs against fake docker, kind and kubectl programs."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from testcluster import binaries, providers
from testcluster.errors import UsageError
from testcluster.kind import provider
from testcluster.kind.config import config
from testcluster.kind.provider import Kind
from testcluster.nodes import parse
from testcluster.provider import ClusterSpec, ControlPlaneOptions
from testcluster.reclaim import reclaim

FAKE_PROGRAM = '''#!{python}
"""Fake docker, kind and kubectl: keeps its containers in docker.json and records every command."""
import fcntl, json, os, sys
from pathlib import Path

file = Path({folder!r}) / "docker.json"
lock = file.with_suffix(".lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)  # the services of a cluster call kubectl meanwhile
empty = {{"containers": {{}}, "labels": {{}}, "deleted": [], "commands": []}}
docker = json.loads(file.read_text()) if file.exists() else empty
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
docker["commands"].append([name, *arguments])
out = ""
options = dict(text.removeprefix("--").split("=", 1) for text in arguments if text.startswith("--") and "=" in text)
if name == "kind" and arguments[:2] == ["create", "cluster"]:
    if os.environ.get("KIND_FAILS"):
        docker["containers"][f"{{options['name']}}-control-plane"] = "running"
        file.write_text(json.dumps(docker))
        sys.exit("ERROR: could not start")
    for number, node in enumerate(json.loads(Path(options["config"]).read_text())["nodes"]):
        suffix = "worker" + (str(number) if number > 1 else "") if node["role"] == "worker" else "control-plane"
        docker["containers"][f"{{options['name']}}-{{suffix}}"] = "running"
        docker["labels"][f"{{options['name']}}-{{suffix}}"] = node.get("labels", {{}})
    Path(options["kubeconfig"]).write_text("{{}}")
elif name == "kind" and arguments[:2] == ["delete", "cluster"]:
    docker["containers"] = {{}}
elif name == "docker" and arguments[0] == "version":
    out = "28"
elif name == "docker" and arguments[0] == "ps":
    out = "\\n".join(docker["containers"])
elif name == "docker" and arguments[:2] == ["image", "inspect"]:
    out = "sha256:1"
elif name == "docker" and arguments[:2] == ["network", "inspect"]:
    out = "fc00::1 127.0.0.1 "
elif name == "docker" and arguments[0] in ("kill", "start", "pause", "unpause"):
    state = {{"kill": "killed", "start": "running", "pause": "paused", "unpause": "running"}}[arguments[0]]
    assert arguments[1] in docker["containers"], arguments
    docker["containers"][arguments[1]] = state
elif name == "docker" and arguments[0] == "network":
    docker["containers"][arguments[3]] = {{"disconnect": "partitioned", "connect": "running"}}[arguments[1]]
elif name == "kubectl" and "nodes" in arguments:
    ready = [{{"type": "Ready", "status": "True", "lastHeartbeatTime": "2999-01-01T00:00:00Z"}}]
    key, _, value = arguments[arguments.index("-l") + 1].partition("=") if "-l" in arguments else ("", "", "")
    labels = {{
        node: docker["labels"][node]
        for node, state in docker["containers"].items()
        if state == "running" and (not key or docker["labels"][node].get(key) == value)
    }}
    out = json.dumps({{"items": [
        {{"metadata": {{"name": node, "uid": node, "labels": labels[node]}}, "status": {{"conditions": ready}}}}
        for node in labels
    ]}})
elif name == "kubectl" and "taint" in arguments:
    assert arguments[arguments.index("node") + 1] in docker["containers"], arguments
elif name == "kubectl" and "delete" in arguments and "node" in arguments:
    docker["deleted"].append(arguments[arguments.index("node") + 1])
file.write_text(json.dumps(docker))
print(out)
'''


class FakeDocker:
    """What the fake programs recorded."""

    def __init__(self, folder: Path):
        self.file = folder / "docker.json"

    @property
    def containers(self) -> dict[str, str]:
        """The state of each container by name."""
        return json.loads(self.file.read_text())["containers"]

    @property
    def deleted_nodes(self) -> list[str]:
        return json.loads(self.file.read_text())["deleted"]

    def commands(self, *prefix: str) -> list[list[str]]:
        """The commands that start with these words."""
        recorded = json.loads(self.file.read_text())["commands"]
        return [
            command for command in recorded if command[: len(prefix)] == list(prefix)
        ]


@pytest.fixture
def docker(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("docker", "kind", "kubectl", "kwok", "registry", "pause"):
        (programs / name).write_text(
            FAKE_PROGRAM.format(python=sys.executable, folder=str(tmp_path))
        )
        (programs / name).chmod(0o755)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(binaries, "build_missing", lambda *_: programs)
    monkeypatch.setattr(
        "testcluster.images.image_layers.busybox", lambda: programs / "pause"
    )
    return FakeDocker(tmp_path)


@pytest.fixture
def cluster(docker):
    created = Kind("lab", node_image="local/node:1")
    created.up(
        ClusterSpec(parse("ondemand,spot:2,gpu"), images=["finetune-operator:dev"])
    )
    yield created
    created.down()


def test_each_node_is_a_worker_with_labels_and_taints():
    content = json.loads(
        config(parse("ondemand,spot"), Path("/volumes"), "local/node:1")
    )
    control, ondemand, spot = content["nodes"]
    assert control["role"] == "control-plane"
    assert {node["image"] for node in content["nodes"]} == {"local/node:1"}
    assert ondemand["labels"]["finetune.dev/capacity"] == "on-demand"
    assert "kubeadmConfigPatches" not in ondemand
    patch = json.loads(spot["kubeadmConfigPatches"][0])
    assert patch["nodeRegistration"]["taints"] == [
        {"key": "spot", "value": "true", "effect": "NoSchedule"}
    ]
    assert all(
        node["extraMounts"][0]["containerPath"] == "/var/finetune-volumes"
        for node in content["nodes"]
    )


def test_default_node_image_is_that_of_kind():
    assert (
        "image" not in json.loads(config(parse("spot"), Path("/volumes")))["nodes"][1]
    )


def test_up_creates_nodes_and_loads_images_without_pulling(docker, cluster):
    assert sorted(docker.containers) == [
        "lab-control-plane",
        "lab-worker",
        "lab-worker2",
        "lab-worker3",
        "lab-worker4",
    ]
    assert [node.name for node in cluster.nodes()] == [
        "ondemand-1",
        "spot-1",
        "spot-2",
        "gpu-1",
    ]
    assert docker.commands("kind", "load", "docker-image", "finetune-operator:dev")
    assert not docker.commands("docker", "pull")
    assert cluster.registry.startswith("127.0.0.1:")


def test_killed_node_can_be_revived(docker, cluster):
    cluster.kill("spot-1")
    assert docker.containers["lab-worker2"] == "killed"
    assert not docker.commands("docker", "stop")
    cluster.revive("spot-1")
    assert docker.containers["lab-worker2"] == "running"


def test_paused_and_partitioned_nodes_recover(docker, cluster):
    cluster.pause("spot-1")
    cluster.partition("spot-2")
    assert (docker.containers["lab-worker2"], docker.containers["lab-worker3"]) == (
        "paused",
        "partitioned",
    )
    cluster.resume("spot-1")
    cluster.heal("spot-2")
    assert set(docker.containers.values()) == {"running"}


def test_delete_kills_node_and_deletes_node_object(docker, cluster):
    cluster.delete("gpu-1")
    assert docker.containers["lab-worker4"] == "killed"
    assert docker.deleted_nodes == ["lab-worker4"]


def test_reclaim_uses_the_node_name_of_kind(docker, cluster):
    states = []
    reclaim(
        cluster,
        "spot-1",
        0.0,
        "taint",
        report=lambda _: states.append(docker.containers["lab-worker2"]),
    )
    assert states == ["running", "killed"]
    assert docker.deleted_nodes == ["lab-worker2"]
    assert [
        command[-3] for command in docker.commands("kubectl") if "taint" in command
    ] == ["lab-worker2"]


def test_add_is_refused_with_the_alternative(cluster):
    [more] = parse("spot", frozenset(node.name for node in cluster.nodes()))
    with pytest.raises(UsageError, match="create it with more --nodes"):
        cluster.add(more)


def test_unknown_node_is_refused(cluster):
    with pytest.raises(UsageError, match="no node 'spot-9'"):
        cluster.kill("spot-9")


def test_control_plane_options_are_refused_on_kind(docker):
    options = ControlPlaneOptions(audit_policy={"rules": [{"level": "Metadata"}]})
    with pytest.raises(UsageError, match="linux-namespaces"):
        Kind("lab").up(ClusterSpec(parse("spot"), control_plane=options))
    assert docker.containers == {}


def test_failed_create_leaves_nothing(docker, monkeypatch, tmp_path):
    monkeypatch.setenv("KIND_FAILS", "1")
    with pytest.raises(Exception, match="could not start"):
        Kind("lab").up(ClusterSpec(parse("spot")))
    assert docker.containers == {}
    assert not (tmp_path / "cache" / "clusters" / "lab").exists()


def test_no_free_registry_port_is_refused_and_leaves_nothing(
    docker, monkeypatch, tmp_path
):
    with socket.create_server(("0.0.0.0", 0)) as listener:
        monkeypatch.setattr(provider, "FIRST_PORT", listener.getsockname()[1])
        monkeypatch.setattr(provider, "PORTS", 1)
        with pytest.raises(UsageError, match="free one for the registry"):
            Kind("lab").up(ClusterSpec(parse("spot")))
    assert docker.containers == {}
    assert not (tmp_path / "cache" / "clusters" / "lab").exists()


def test_down_stops_the_services_on_the_host(docker):
    created = Kind("lab")
    created.up(ClusterSpec(parse("spot")))
    pids = [int(pid) for pid in (created.folder / "pids").read_text().split()]
    assert pids
    created.down()
    assert not created.folder.exists()
    assert not created.exists()


def test_cluster_of_kind_is_found_as_such(cluster):
    assert isinstance(providers.find("lab"), Kind)


def test_kind_is_the_default_where_docker_answers(docker):
    assert isinstance(providers.choose("lab", None), Kind)


def test_kind_without_docker_engine_is_refused(docker, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath if "docker" not in os.defpath else "/bin")
    monkeypatch.setattr(
        "testcluster.images.image_builders.Docker.is_available", lambda _: False
    )
    with pytest.raises(UsageError, match="no Docker engine answers"):
        Kind("lab").up(ClusterSpec(parse("spot")))
