"""What kind is told, and what becomes of a namespace in which kind and docker are small programs that keep books."""

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
from testcluster.provider import ClusterSpec
from testcluster.reclaim import reclaim

BOOKS = '''#!{python}
"""Stands for docker, kind and kubectl: keeps containers in books.json and notes every command."""
import json, os, sys
from pathlib import Path

books = Path({folder!r}) / "books.json"
fresh = {{"containers": {{}}, "labels": {{}}, "deleted": [], "said": []}}
namespace = json.loads(books.read_text()) if books.exists() else fresh
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
namespace["said"].append([name, *arguments])
out = ""
options = dict(word.removeprefix("--").split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
if name == "kind" and arguments[:2] == ["create", "cluster"]:
    if os.environ.get("KIND_FAILS"):
        namespace["containers"][f"{{options['name']}}-control-plane"] = "running"
        books.write_text(json.dumps(namespace))
        sys.exit("ERROR: could not start")
    for number, node in enumerate(json.loads(Path(options["config"]).read_text())["nodes"]):
        suffix = "worker" + (str(number) if number > 1 else "") if node["role"] == "worker" else "control-plane"
        namespace["containers"][f"{{options['name']}}-{{suffix}}"] = "running"
        namespace["labels"][f"{{options['name']}}-{{suffix}}"] = node.get("labels", {{}})
    Path(options["kubeconfig"]).write_text("{{}}")
elif name == "kind" and arguments[:2] == ["delete", "cluster"]:
    namespace["containers"] = {{}}
elif name == "docker" and arguments[0] == "version":
    out = "28"
elif name == "docker" and arguments[0] == "ps":
    out = "\\n".join(namespace["containers"])
elif name == "docker" and arguments[:2] == ["network", "inspect"]:
    out = "fc00::1 127.0.0.1 "
elif name == "docker" and arguments[0] in ("kill", "start", "pause", "unpause"):
    state = {{"kill": "killed", "start": "running", "pause": "paused", "unpause": "running"}}[arguments[0]]
    assert arguments[1] in namespace["containers"], arguments
    namespace["containers"][arguments[1]] = state
elif name == "docker" and arguments[0] == "network":
    namespace["containers"][arguments[3]] = {{"disconnect": "cut off", "connect": "running"}}[arguments[1]]
elif name == "kubectl" and "nodes" in arguments:
    ready = [{{"type": "Ready", "status": "True", "lastHeartbeatTime": "2999-01-01T00:00:00Z"}}]
    key, _, value = arguments[arguments.index("-l") + 1].partition("=") if "-l" in arguments else ("", "", "")
    out = json.dumps({{"items": [
        {{"metadata": {{"name": one, "uid": one, "labels": namespace["labels"][one]}}, "status": {{"conditions": ready}}}}
        for one, state in namespace["containers"].items()
        if state == "running" and (not key or namespace["labels"][one].get(key) == value)
    ]}})
elif name == "kubectl" and "taint" in arguments:
    assert arguments[arguments.index("node") + 1] in namespace["containers"], arguments
elif name == "kubectl" and "delete" in arguments and "node" in arguments:
    namespace["deleted"].append(arguments[arguments.index("node") + 1])
books.write_text(json.dumps(namespace))
print(out)
'''


class World:
    def __init__(self, folder: Path):
        self.books = folder / "books.json"

    @property
    def containers(self) -> dict[str, str]:
        return json.loads(self.books.read_text())["containers"]

    @property
    def deleted(self) -> list[str]:
        return json.loads(self.books.read_text())["deleted"]

    def said(self, *words: str) -> list[list[str]]:
        return [told for told in json.loads(self.books.read_text())["said"] if told[: len(words)] == list(words)]


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("docker", "kind", "kubectl", "kwok", "registry", "pause"):
        (programs / name).write_text(BOOKS.format(python=sys.executable, folder=str(tmp_path)))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(binaries, "build_missing", lambda *_: programs)
    monkeypatch.setattr("testcluster.images.packing.busybox", lambda: programs / "pause")
    return World(tmp_path)


@pytest.fixture
def cluster(namespace):
    made = Kind("lab", node_image="local/node:1")
    made.up(ClusterSpec(parse("ondemand,spot:2,gpu"), images=["finetune-operator:dev"]))
    yield made
    made.down()


def test_each_node_is_a_worker_with_its_labels_and_taints():
    told = json.loads(config(parse("ondemand,spot"), Path("/volumes"), "local/node:1"))
    control, ondemand, spot = told["nodes"]
    assert control["role"] == "control-plane"
    assert {node["image"] for node in told["nodes"]} == {"local/node:1"}
    assert ondemand["labels"]["finetune.dev/capacity"] == "on-demand"
    assert "kubeadmConfigPatches" not in ondemand
    patch = json.loads(spot["kubeadmConfigPatches"][0])
    assert patch["nodeRegistration"]["taints"] == [{"key": "spot", "value": "true", "effect": "NoSchedule"}]
    assert all(node["extraMounts"][0]["containerPath"] == "/var/finetune-volumes" for node in told["nodes"])


def test_without_an_image_kind_takes_its_own():
    assert "image" not in json.loads(config(parse("spot"), Path("/volumes")))["nodes"][1]


def test_up_makes_every_node_and_brings_images_without_pulling(namespace, cluster):
    assert sorted(namespace.containers) == [
        "lab-control-plane",
        "lab-worker",
        "lab-worker2",
        "lab-worker3",
        "lab-worker4",
    ]
    assert [node.name for node in cluster.nodes()] == ["ondemand-1", "spot-1", "spot-2", "gpu-1"]
    assert namespace.said("kind", "load", "docker-image", "finetune-operator:dev")
    assert not namespace.said("docker", "pull")
    assert cluster.registry.startswith("127.0.0.1:")


def test_the_power_goes_off_and_on(namespace, cluster):
    cluster.kill("spot-1")
    assert namespace.containers["lab-worker2"] == "killed"
    assert not namespace.said("docker", "stop")
    cluster.revive("spot-1")
    assert namespace.containers["lab-worker2"] == "running"


def test_hung_and_cut_off_nodes_come_back(namespace, cluster):
    cluster.pause("spot-1")
    cluster.partition("spot-2")
    assert (namespace.containers["lab-worker2"], namespace.containers["lab-worker3"]) == ("paused", "cut off")
    cluster.resume("spot-1")
    cluster.heal("spot-2")
    assert set(namespace.containers.values()) == {"running"}


def test_a_deleted_node_is_dead_and_its_object_gone(namespace, cluster):
    cluster.delete("gpu-1")
    assert namespace.containers["lab-worker4"] == "killed"
    assert namespace.deleted == ["lab-worker4"]


def test_a_reclaimed_node_is_told_under_the_name_that_kind_gave_it(namespace, cluster):
    told = []
    reclaim(cluster, "spot-1", 0.0, "taint", say=lambda _: told.append(namespace.containers["lab-worker2"]))
    assert told == ["running", "killed"]
    assert namespace.deleted == ["lab-worker2"]
    assert [words[-3] for words in namespace.said("kubectl") if "taint" in words] == ["lab-worker2"]


def test_a_node_cannot_be_added_and_it_says_what_to_do(cluster):
    [more] = parse("spot", frozenset(node.name for node in cluster.nodes()))
    with pytest.raises(UsageError, match="make it anew with more --nodes"):
        cluster.add(more)


def test_a_node_that_there_is_not_is_refused(cluster):
    with pytest.raises(UsageError, match="no node 'spot-9'"):
        cluster.kill("spot-9")


def test_when_kind_fails_everything_half_made_is_removed(namespace, monkeypatch, tmp_path):
    monkeypatch.setenv("KIND_FAILS", "1")
    with pytest.raises(Exception, match="could not start"):
        Kind("lab").up(ClusterSpec(parse("spot")))
    assert namespace.containers == {}
    assert not (tmp_path / "cache" / "clusters" / "lab").exists()


def test_when_no_port_is_free_for_the_registry_it_says_so_and_leaves_nothing(namespace, monkeypatch, tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as somebody:
        monkeypatch.setattr(provider, "FIRST_PORT", somebody.getsockname()[1])
        monkeypatch.setattr(provider, "PORTS", 1)
        with pytest.raises(UsageError, match="free one for the registry"):
            Kind("lab").up(ClusterSpec(parse("spot")))
    assert namespace.containers == {}
    assert not (tmp_path / "cache" / "clusters" / "lab").exists()


def test_down_stops_the_programs_beside_the_cluster(namespace):
    made = Kind("lab")
    made.up(ClusterSpec(parse("spot")))
    beside = [int(pid) for pid in (made.folder / "pids").read_text().split()]
    assert beside
    made.down()
    assert not made.folder.exists()
    assert not made.exists()


def test_kind_is_chosen_where_a_docker_engine_answers(namespace):
    assert isinstance(providers.choose("lab", None), Kind)


def test_without_an_engine_kind_is_refused(namespace, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath if "docker" not in os.defpath else "/bin")
    monkeypatch.setattr("testcluster.images.engines.Docker.there", lambda _: False)
    with pytest.raises(UsageError, match="no Docker engine answers"):
        Kind("lab").up(ClusterSpec(parse("spot")))
