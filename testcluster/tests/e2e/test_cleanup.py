"""Clusters that are deleted, also after kill -9 of `up`, leave nothing: everything is counted before and after."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testcluster import binaries, cluster_state, fixtures, providers
from testcluster.kube_namespace import until
from testcluster.linux_namespaces import cgroups
from testcluster.linux_namespaces.programs import NEEDED
from testcluster.linux_namespaces.provider import LinuxNamespaces
from testcluster.nodes import parse
from testcluster.provider import ClusterSpec

ROOT = Path(__file__).parents[3]
ROUNDS = 20 if os.environ.get("FAULTS") == "all" else 6
KILLS = 10
WATCHED = (
    "/etc",
    "/etc/cni",
    "/opt",
    "/opt/cni",
    "/run",
    "/run/netns",
    "/tmp",
    "/var/lib",
    "/var/log",
    "/var/run",
    "/mnt",
)

pytestmark = pytest.mark.skipif(
    fixtures.PROVIDER == "kind",
    reason="counts what the provider linux-namespaces creates",
)


def census() -> dict[str, Counter[str]]:
    """Count everything that a cluster consists of."""
    processes = list(Path("/proc").glob("[0-9]*"))
    return {
        "processes": Counter(
            line
            for line in map(_command_line, processes)
            if str(cluster_state.clusters()) in line
        ),
        "mounts": Counter(
            line.split()[4]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ),
        "links": Counter(entry.name for entry in Path("/sys/class/net").iterdir()),
        "network namespaces": Counter(set(map(_namespace, processes)) - {""}),
        "routes": Counter(_lines("ip", "route", "show", "table", "all")),
        "rules": Counter(_lines("nft", "list", "ruleset")),
        "cgroups": Counter(
            str(at / name)
            for at in cgroups.hierarchies()
            for name in cgroups.with_prefix("finetune.")
        ),
        "clusters": Counter(path.name for path in cluster_state.clusters().glob("*")),
        "settings": Counter(
            f"{name}={Path('/proc/sys', name).read_text()}" for name in SETTINGS
        ),
        "files": Counter(
            str(entry)
            for folder in map(Path, WATCHED)
            if folder.is_dir()
            for entry in folder.iterdir()
        ),
    }


def leftovers(before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Return what exists now and did not before. What disappeared may have belonged to another cluster."""
    after = census()
    created = {key: after[key] - before[key] for key in before}
    return {key: more for key, more in created.items() if more}


SETTINGS = (
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
)


def _command_line(process: Path) -> str:
    try:
        return (
            (process / "cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def _namespace(process: Path) -> str:
    try:
        return str((process / "ns" / "net").readlink())
    except OSError:
        return ""


def _lines(*command: str) -> list[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.fixture(autouse=True, scope="module")
def programs() -> None:
    binaries.build_missing(NEEDED)
    fixtures.remove_leftovers()


@pytest.fixture
def no_leftovers():
    """Fail the test when anything of its clusters is left."""
    before = census()
    yield
    deadline = time.monotonic() + 20
    # The kernel deletes a network namespace shortly after its last process has exited.
    while leftovers(before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert leftovers(before) == {}


def test_ups_and_downs_leave_nothing(no_leftovers):
    durations = []
    for turn in range(ROUNDS):
        cluster = LinuxNamespaces(fixtures.cluster_name(f"turn{turn}"))
        started = time.monotonic()
        cluster.up(ClusterSpec(parse("ondemand,spot")))
        durations.append(time.monotonic() - started)
        cluster.down()
    median = sorted(durations)[len(durations) // 2]
    print(
        f"Ready after {min(durations):.1f}-{max(durations):.1f} s, median {median:.1f} s"
    )


def test_parallel_clusters_are_isolated(no_leftovers):
    clusters = [
        LinuxNamespaces(fixtures.cluster_name(name)) for name in ("one", "two", "three")
    ]
    with ThreadPoolExecutor(3) as pool:
        list(
            pool.map(
                lambda cluster: cluster.up(ClusterSpec(parse("ondemand"))), clusters
            )
        )
    assert len({cluster.registry for cluster in clusters}) == 3
    for cluster in clusters:
        cluster.kube.run("create", "namespace", cluster.name)
    clusters[0].down()
    for cluster in clusters[1:]:
        names = {
            namespace["metadata"]["name"]
            for namespace in cluster.kube.json("get", "namespaces")["items"]
        }
        assert {name for name in names if name.startswith("t")} == {cluster.name}
        cluster.down()


def test_down_after_kill_9_of_up_leaves_nothing(no_leftovers):
    moments = random.Random(4)
    for turn in range(KILLS):
        name = fixtures.cluster_name(f"killed{turn}")
        up = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "testcluster",
                "--name",
                name,
                "--provider",
                "linux-namespaces",
                "up",
                "--nodes",
                "ondemand,spot",
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(moments.uniform(0.4, 4.5))
        up.send_signal(signal.SIGKILL)
        up.wait()
        for cluster in providers.existing(name):
            cluster.down()
        assert not providers.existing(name)


@pytest.mark.parametrize(
    "arguments",
    ["--kubeconfig {}/kubeconfig", "push image docker-archive:{}/image.tar:image"],
)
def test_down_kills_orphaned_commands_of_up(no_leftovers, arguments):
    cluster = LinuxNamespaces(fixtures.cluster_name("orphans"))
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    orphan = subprocess.Popen(
        [*sleep, *arguments.format(cluster.folder).split()], start_new_session=True
    )
    neighbour = subprocess.Popen(
        [*sleep, *arguments.format(f"{cluster.folder}-2").split()],
        start_new_session=True,
    )
    until(lambda: str(cluster.folder) in _command_line(Path(f"/proc/{orphan.pid}")), 10)
    cluster.down()
    assert orphan.wait(10) == -signal.SIGKILL
    assert neighbour.poll() is None
    neighbour.kill()
    neighbour.wait()


def test_ctrl_c_during_up_leaves_nothing(no_leftovers):
    name = fixtures.cluster_name("stopped")
    command = [
        sys.executable,
        "-m",
        "testcluster",
        "--name",
        name,
        "--provider",
        "linux-namespaces",
        "up",
    ]
    up = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until((cluster_state.folder_of(name) / "kubeconfig").exists, 30)
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 130
    assert not providers.existing(name)
