"""The node image and the Docker engine of the tests: what is refused, limited, loaded and cleaned up."""

import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from testcluster import binaries
from testcluster.errors import TimedOut, UsageError
from testcluster.images.image_builders import Docker
from testcluster.kind import engine, node_image, node_root, oci_runtime

FAKE_DOCKER = """#!/bin/sh
echo "$@" >> {folder}/commands
[ "$1 $2" != "image inspect" ] || exit 1
[ -z "$DOCKER_FAILS" ] || {{ echo no space left on device >&2; exit 1; }}
[ "$1" = image ] || cat > {folder}/$1
"""
PRIVILEGED = {
    "capabilities": {
        name: ["CAP_KILL", "CAP_SYS_RESOURCE"] for name in ("bounding", "effective")
    },
    "oomScoreAdj": -999,
    "args": ["/sbin/init"],
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """The folder in which a fake docker records its commands, and its standard input by command."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "docker").write_text(FAKE_DOCKER.format(folder=tmp_path))
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def archive(tmp_path):
    file = tmp_path / "node-aa.tar"
    file.write_text("files")
    return file


@pytest.fixture
def runc(monkeypatch):
    """The arguments with which runc would be started."""
    started = []
    monkeypatch.setattr(
        os, "execv", lambda program, arguments: started.extend(arguments)
    )
    return started


@pytest.fixture
def limited_root(monkeypatch):
    monkeypatch.setattr(oci_runtime, "granted_capabilities", lambda: {"CAP_KILL"})


def test_container_gets_only_what_root_has(tmp_path, runc, limited_root):
    (tmp_path / "config.json").write_text(
        json.dumps({"hostname": "node", "process": PRIVILEGED})
    )
    oci_runtime.main(
        "/usr/sbin/runc", ["create", "--bundle", str(tmp_path), "container"]
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["process"]["capabilities"] == {
        "bounding": ["CAP_KILL"],
        "effective": ["CAP_KILL"],
    }
    assert config["process"]["oomScoreAdj"] == int(
        Path("/proc/self/oom_score_adj").read_text()
    )
    assert (config["hostname"], config["process"]["args"]) == ("node", ["/sbin/init"])
    assert runc == ["/usr/sbin/runc", "create", "--bundle", str(tmp_path), "container"]


def test_process_in_a_container_gets_only_what_root_has(tmp_path, runc, limited_root):
    file = tmp_path / "process.json"
    file.write_text(json.dumps(PRIVILEGED))
    oci_runtime.main("/usr/sbin/runc", ["exec", "--process", str(file), "container"])
    assert json.loads(file.read_text())["capabilities"]["effective"] == ["CAP_KILL"]


def test_full_root_keeps_the_configuration(tmp_path, runc, monkeypatch):
    monkeypatch.setattr(
        oci_runtime,
        "granted_capabilities",
        lambda: {f"CAP_{name}" for name in oci_runtime.NAMES},
    )
    (tmp_path / "config.json").write_text(json.dumps({"process": PRIVILEGED}))
    oci_runtime.main(
        "/usr/sbin/runc", ["create", "--bundle", str(tmp_path), "container"]
    )
    assert (
        json.loads((tmp_path / "config.json").read_text())["process"]["oomScoreAdj"]
        == -999
    )


def test_node_image_has_the_files_and_the_stop_signal(docker, archive):
    name = node_image.load(archive, lambda _: None)
    assert name == "localhost/finetune-kind-node:aa"
    assert (docker / "import").read_text() == "files"
    assert (docker / "build").read_text().splitlines()[0] == f"FROM {name}-files"
    assert "STOPSIGNAL SIGRTMIN+3" in (docker / "build").read_text()
    assert f"build --tag={name} -" in (docker / "commands").read_text()


def test_failed_load_names_the_output_of_docker(docker, archive, monkeypatch):
    monkeypatch.setenv("DOCKER_FAILS", "1")
    with pytest.raises(TimedOut, match="docker import: no space left on device"):
        node_image.load(archive, lambda _: None)


def test_node_image_on_a_small_disk_is_refused(cache, monkeypatch):
    monkeypatch.setattr(binaries, "build_missing", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(UsageError, match=r"1\.0 GiB free, but a node image needs 5"):
        node_image.build(lambda _: None)
    assert not node_root.folder().exists()


def test_archive_of_another_checkout_is_kept_for_a_day(cache, monkeypatch):
    monkeypatch.setattr(binaries, "build_missing", lambda *_: None)
    monkeypatch.setattr(node_root, "provide", lambda _: node_root.archive())
    monkeypatch.setattr(node_image, "_build", lambda _, target: target.touch())
    monkeypatch.setattr(node_image, "REQUIRED_BYTES", 0)
    node_root.folder().mkdir(parents=True)
    for name in ("root-old.tar", "node-recent.tar", node_root.archive().name):
        (node_root.folder() / name).touch()
    os.utime(node_root.folder() / "root-old.tar", (0, 0))
    built = node_image.build(lambda _: None)
    names = {file.name for file in node_root.folder().iterdir()}
    assert names == {"node-recent.tar", node_root.archive().name, built.name}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_engine_of_an_ended_process_is_deleted(cache):
    for owner in ("t1", "t4194305"):
        (engine.engines() / owner / "data").mkdir(parents=True)
    engine.remove_leftovers()
    assert [folder.name for folder in engine.engines().iterdir()] == ["t1"]


def test_engine_without_dockerd_names_the_packages(monkeypatch):
    monkeypatch.setattr(Docker, "is_available", lambda _: False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"apt install docker\.io iptables"):
        engine.check()


@pytest.fixture
def limited_machine(cache, monkeypatch):
    """A machine on which root may neither change the firewall nor create a network namespace."""
    ends = ["sh", "-c", "echo starting; echo iptables: Permission denied; exit 1"]
    monkeypatch.setattr(Docker, "is_available", lambda _: False)
    monkeypatch.setattr(engine, "check", lambda: None)
    monkeypatch.setattr(engine, "_raise_inotify", lambda _: None)
    monkeypatch.setattr(engine, "contained", lambda *_: ends)
    monkeypatch.setattr(engine, "libc", SimpleNamespace(unshare=lambda _: -1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_engine_without_a_network_namespace_is_refused(limited_machine):
    with (
        pytest.raises(UsageError, match=r"needs a network namespace: .*unshare"),
        engine.running(lambda _: None),
    ):
        pass


def test_engine_that_ends_is_refused_with_its_last_line(limited_machine, monkeypatch):
    monkeypatch.setattr(engine, "_network", nullcontext)
    expected = "^dockerd cannot run on this machine: iptables: Permission denied; start Docker$"
    with pytest.raises(UsageError, match=expected), engine.running(lambda _: None):
        pass
