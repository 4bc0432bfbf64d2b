"""Operators as real processes that start in milliseconds, so that tests can kill them.

Importing the operator takes more than a second of CPU time. The process of operator_prefork.py imports it once and
forks for every start. It has a single thread when it forks, so a child behaves like a new process.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
IDENTITY = "replica"
KUBECONFIG = "kubeconfig"
"""The file's name in the folder of each replica; operator_prefork.py explains why it is relative."""


class OperatorForks:
    """The client of an operator_prefork process."""

    def __init__(self, operators: Path = REPOSITORY) -> None:
        """Start the process; `operators` is the checkout whose operator it runs."""
        folders = (operators / "operator", operators / "trainer", REPOSITORY / "tests")
        path = os.pathsep.join(map(str, folders))
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("operator_prefork.py")],
            env=os.environ | {"PYTHONPATH": path, "KUBECONFIG": KUBECONFIG},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def request(self, request: dict[str, object]) -> int:
        """Send a request to the prefork process and return its answer."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the prefork process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


@dataclass
class OperatorProcess:
    """One replica of the operator, which can be killed and started again.

    A restarted replica has the same identity, as a container that the kubelet restarts in its pod. The Lease that the
    killed process held is therefore its own, and it leads at once. `kill` waits until the old process is
    gone, so that two processes never have the same identity.
    """

    forks: OperatorForks
    folder: Path
    """With the kubeconfig and the log; its name tells replicas apart."""
    namespace: str
    identity: str = IDENTITY
    clock: float = 0.0
    """Seconds by which the process's clock is ahead."""
    arguments: tuple[str, ...] = ()
    starts: int = 0
    pid: int | None = field(default=None)

    @property
    def log(self) -> Path:
        """The log of all processes of the replica."""
        return self.folder / "log"

    def start(self) -> None:
        """Start the process."""
        arguments = [
            f"--namespace={self.namespace}",
            f"--lease-namespace={self.namespace}",
            f"--identity={self.identity}",
            "--port=0",
            "--grace-seconds=5",
            *self.arguments,
        ]
        request = {
            "log": str(self.log),
            "folder": str(self.folder),
            "arguments": arguments,
        }
        self.pid = self.forks.request({**request, "clock": self.clock})
        self.starts += 1

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        if self.pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.forks.request({"wait": self.pid})
        self.pid = None

    def is_running(self) -> bool:
        """Return whether the process exists and is no zombie."""
        try:
            return (
                Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
                != "Z"
            )
        except OSError:
            return False

    def resident_bytes(self) -> int:
        """Return the resident memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def restart(self) -> None:
        """Kill the process and start it again, with a Lease of another name.

        A new process waits until the Lease of the killed process has expired, 15 s. That would only prolong the test,
        because the killed process is certainly gone.
        """
        self.kill()
        self.arguments = (
            *self.arguments,
            f"--lease-name=finetune-operator-{self.starts}",
        )
        self.start()
