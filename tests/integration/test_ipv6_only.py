"""What listens in a pod or on a laptop listens without IPv4, too: in a network namespace that has only ::1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMESPACE = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
"""The shell command that removes IPv4 from a new network namespace, and then runs its arguments."""
PROGRESS = """
import json, socket, sys, urllib.request
from pathlib import Path
from finetune_trainer.contract import Environment
from finetune_trainer.runtime.progress.progress import ProgressReporter

with socket.socket(socket.AF_INET6) as probe:
    probe.bind(("::1", 0))
    port = probe.getsockname()[1]
ProgressReporter("train", Environment(Path(), metrics_port=port)).update(step=7)
with urllib.request.urlopen(f"http://[::1]:{port}/progress", timeout=5) as response:
    print(json.load(response)["step"])
"""
SERVE = """
import sys
from pathlib import Path
from finetune_trainer.contract.engines import ENGINES
from finetune_trainer.serving.server import check_listed, serving
from finetune_trainer.stop_signal import stop

model, host, log = sys.argv[1:]
with stop.deferred(), serving(
    ENGINES["Transformers"], Path(model), stop, Path(log), host=host
) as server:
    check_listed(server)
    print(server.url)
"""
STORE = """
from finetune_trainer.listening import listen_on_loopback, loopback
from torch.distributed import TCPStore

server = listen_on_loopback()
port = server.getsockname()[1]
store = TCPStore(loopback(), port, is_master=True, wait_for_workers=False,
                 master_listen_fd=server.detach())
TCPStore(loopback(), port, is_master=False).set("key", "value")
print(store.get("key").decode())
"""


def run_without_ipv4(program: str, *arguments: str) -> str:
    """Return what a Python program prints in a namespace without IPv4. Needs root."""
    command = ["unshare", "--net", "sh", "-ec", NAMESPACE, "sh", sys.executable, "-c"]
    paths = [str(ROOT / "trainer"), str(ROOT / "operator")]
    result = subprocess.run(
        [*command, program, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


def test_progress_is_served_without_ipv4() -> None:
    assert run_without_ipv4(PROGRESS) == "7"


def test_processes_of_a_pod_meet_without_ipv4() -> None:
    assert run_without_ipv4(STORE) == "value"


@pytest.mark.parametrize("host", ["", "::"], ids=["local run", "pod"])
def test_transformers_server_answers_without_ipv4(
    host: str, tiny_model: Path, tmp_path: Path
) -> None:
    url = run_without_ipv4(SERVE, str(tiny_model), host, str(tmp_path / "log"))
    assert url.startswith("http://[::1]:")
