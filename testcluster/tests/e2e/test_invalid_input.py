"""Wrong input and poor machines: one clear line, exit status 2, and nothing half-begun left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testcluster import binaries, fixtures, state
from testcluster.kind.config import config
from testcluster.linux_namespaces import cgroups
from testcluster.nodes import parse

ROOT = Path(__file__).parents[3]
BARE = [sys.executable, "-m", "testcluster", "--provider", "bare"]


def asked(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_node_class_that_there_is_not():
    said = asked(*BARE, "--name", "refused", "up", "--nodes", "spots:2")
    assert said.returncode == 2
    assert (
        said.stderr
        == "cluster: --nodes: 'spots:2' is not a node class; write ondemand, spot, gpu, as in ondemand,spot:3\n"
    )


def test_a_node_of_a_cluster_that_there_is_not():
    said = asked(*BARE, "--name", "nobody", "node", "kill", "spot-1")
    assert said.returncode == 2
    assert said.stderr.startswith("cluster: there is no cluster nobody")
    assert said.stderr.count("\n") == 1


@pytest.mark.skipif(fixtures.PROVIDER == "kind", reason="needs a machine without Docker to mean anything")
def test_a_machine_whose_kernel_gives_no_namespaces():
    said = asked("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *BARE, "--name", "refused", "up")
    assert said.returncode == 2
    assert "this kernel does not offer" in said.stderr
    assert not state.folder_of("refused").exists()


@pytest.mark.skipif(fixtures.PROVIDER == "kind", reason="needs a machine without Docker to mean anything")
def test_root_that_may_not_change_this_hosts_network():
    said = asked("unshare", "--user", "--map-root-user", *BARE, "--name", "refused", "up")
    assert said.returncode == 2
    assert said.stderr.startswith("cluster: ip link add")
    assert "run it as root of the machine" in said.stderr
    assert said.stderr.count("\n") == 1
    assert not state.folder_of("refused").exists()


def test_a_disk_that_is_too_small_for_a_cluster(tmp_path):
    # The mount is seen by this command alone.
    small = f"mount -t tmpfs -o size=1g small {tmp_path} && exec {' '.join(BARE)} --name refused up"
    said = asked("unshare", "--mount", "sh", "-c", small, FINETUNE_CACHE=str(tmp_path))
    assert said.returncode == 2
    assert "1.0 GiB free" in said.stderr
    assert said.stderr.count("\n") == 1


def test_an_image_that_nobody_knows():
    said = asked(*BARE, "--name", "refused", "up", "--image", "nobody/knows:1")
    assert said.returncode == 2
    assert "no engine here knows the image nobody/knows:1" in said.stderr
    assert not state.folder_of("refused").exists()
    assert not cgroups.like("finetune.refused.")


def test_kinds_own_program_reads_our_configuration_and_misses_nothing_but_the_engine(tmp_path):
    kind = str(binaries.build_missing(["kind"]) / "kind")
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    right.write_text(config(parse("ondemand,spot:2,gpu"), tmp_path, "local/node:1"))
    wrong.write_text(json.dumps(json.loads(right.read_text()) | {"nonsense": True}))
    without_engine = {"PATH": "/nowhere", "HOME": str(tmp_path), "DOCKER_HOST": "unix:///nowhere"}
    for file, complaint in ((right, "docker"), (wrong, "nonsense")):
        command = [kind, "create", "cluster", "--name=refused", f"--config={file}"]
        said = subprocess.run(command, env=without_engine, capture_output=True, text=True, check=False)
        assert said.returncode != 0
        assert complaint in said.stderr
        assert ("nonsense" in said.stderr) == (file == wrong)
