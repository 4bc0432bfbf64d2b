"""Invalid input and unsuitable machines: one line of error, exit code 2, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testcluster import binaries, cluster_state, fixtures
from testcluster.kind.config import config
from testcluster.linux_namespaces import cgroups
from testcluster.nodes import parse

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "testcluster", "--provider", "linux-namespaces"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_unknown_node_class():
    done = run(*COMMAND, "--name", "refused", "up", "--nodes", "spots:2")
    assert done.returncode == 2
    assert (
        done.stderr
        == "cluster: --nodes: 'spots:2' is not a node class; write ondemand, spot, gpu, as in ondemand,spot:3\n"
    )


def test_node_of_an_unknown_cluster():
    done = run(*COMMAND, "--name", "missing", "node", "kill", "spot-1")
    assert done.returncode == 2
    assert done.stderr.startswith("cluster: there is no cluster missing")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(
    fixtures.PROVIDER == "kind", reason="tests the provider linux-namespaces"
)
def test_kernel_without_namespaces():
    done = run(
        "setpriv",
        "--bounding-set=-sys_admin",
        "--inh-caps=-sys_admin",
        *COMMAND,
        "--name",
        "refused",
        "up",
    )
    assert done.returncode == 2
    assert "this kernel does not offer" in done.stderr
    assert not cluster_state.folder_of("refused").exists()


@pytest.mark.skipif(
    fixtures.PROVIDER == "kind", reason="tests the provider linux-namespaces"
)
def test_root_without_rights_to_the_host_network():
    done = run(
        "unshare", "--user", "--map-root-user", *COMMAND, "--name", "refused", "up"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("cluster: ip link add")
    assert "run it as root of the host" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not cluster_state.folder_of("refused").exists()


def test_disk_too_small_for_a_cluster(tmp_path):
    # Only this command sees the mount.
    small = f"mount -t tmpfs -o size=1g small {tmp_path} && exec {' '.join(COMMAND)} --name refused up"
    done = run("unshare", "--mount", "sh", "-c", small, FINETUNE_CACHE=str(tmp_path))
    assert done.returncode == 2
    assert "1.0 GiB free" in done.stderr
    assert done.stderr.count("\n") == 1


def test_unknown_image():
    done = run(*COMMAND, "--name", "refused", "up", "--image", "unknown/image:1")
    assert done.returncode == 2
    assert "no engine has the image unknown/image:1" in done.stderr
    assert not cluster_state.folder_of("refused").exists()
    assert not cgroups.with_prefix("finetune.refused.")


def test_kind_program_accepts_the_configuration(tmp_path):
    """Without an engine kind fails in any case; the error tells whether it rejected the configuration first."""
    kind = str(binaries.program("kind"))
    valid = tmp_path / "valid.json"
    invalid = tmp_path / "invalid.json"
    valid.write_text(config(parse("ondemand,spot:2,gpu"), tmp_path, "local/node:1"))
    invalid.write_text(json.dumps(json.loads(valid.read_text()) | {"nonsense": True}))
    without_engine = {
        "PATH": "/nowhere",
        "HOME": str(tmp_path),
        "DOCKER_HOST": "unix:///nowhere",
    }
    for file, expected in ((valid, "docker"), (invalid, "nonsense")):
        command = [kind, "create", "cluster", "--name=refused", f"--config={file}"]
        done = subprocess.run(
            command, env=without_engine, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert expected in done.stderr
        assert ("nonsense" in done.stderr) == (file == invalid)
