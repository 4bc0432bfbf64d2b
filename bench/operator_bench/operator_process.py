"""The operator under measurement as a process: started, awaited, stopped; driven by the API server only."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from operator_bench.api import NAMESPACE
from operator_bench.cluster import BenchCluster
from processes import cpu_seconds

ROOT = Path(__file__).parents[2]
READY_WITHIN = 600
"""Seconds until the operator answers /readyz: a bound, not a goal."""
IDLE_CPU = 0.1
"""Share of one processor below which the operator counts as idle."""
IDLE_SECONDS = 5.0
TRAINER_IMAGE = "trainer"
"""Never pulled: kwok runs no container."""


def free_port() -> int:
    """Return a port that no process listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class OperatorProcess:
    """One process of `python -m finetune_operator`."""

    def __init__(self, bench: BenchCluster, workers: int | None = None) -> None:
        self.bench = bench
        self.workers = workers
        self.log = bench.folder / "operator.log"
        self.started = 0.0
        self.port = free_port()
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        paths = os.pathsep.join(str(ROOT / part) for part in ("operator", "trainer"))
        kubeconfig = str(self.bench.kubeconfig("operator"))
        variables = {
            "PYTHONPATH": paths,
            "KUBECONFIG": kubeconfig,
            "POD_NAMESPACE": NAMESPACE,
            "POD_NAME": "bench",
        }
        command = [
            sys.executable,
            "-m",
            "finetune_operator",
            "--trainer-image",
            TRAINER_IMAGE,
            "--port",
            str(self.port),
        ]
        if self.workers:
            command += ["--workers", str(self.workers)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | variables, stdout=output, stderr=output
            )
        self.started = time.monotonic()

    def wait_ready(self) -> float:
        """Wait until /readyz answers; return the seconds since the start."""
        deadline = self.started + READY_WITHIN
        while not self._is_ready():
            assert time.monotonic() < deadline, (
                f"the operator is not ready: {self.log.read_text()[-2000:]}"
            )
            time.sleep(0.1)
        return time.monotonic() - self.started

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, (
            f"the operator ended: {self.log.read_text()[-2000:]}"
        )
        with (
            suppress(OSError),
            urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/readyz", timeout=5
            ) as response,
        ):
            return bool(response.status == 200)
        return False

    def wait_idle(self, seconds: float = 120) -> None:
        """Wait until the process uses nearly no CPU for five seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            before = cpu_seconds(self.pid)
            time.sleep(IDLE_SECONDS)
            if cpu_seconds(self.pid) - before < IDLE_CPU * IDLE_SECONDS:
                return
        print(f"the operator is not idle after {seconds:g} s", file=sys.stderr)

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self.process.pid

    def stop(self) -> None:
        """Stop the process by SIGTERM, so that it releases its Lease."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running_operator(
    bench: BenchCluster, workers: int | None = None
) -> Iterator[OperatorProcess]:
    """Start an operator, wait until it is ready, and stop it at the end."""
    operator = OperatorProcess(bench, workers)
    operator.start()
    try:
        operator.wait_ready()
        yield operator
    finally:
        operator.stop()


@contextmanager
def running_module(module: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a program of this package with pipes, and wait for its line `ready`; kill it at the end."""
    variables = {"PYTHONPATH": str(ROOT / "bench")}
    command = [sys.executable, "-m", f"operator_bench.{module}", *arguments]
    process = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert _pipe(process.stdout).readline() == "ready\n", (
                f"{module} did not start"
            )
            yield process
        finally:
            process.kill()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe
    return pipe


def begin(process: "subprocess.Popen[str]") -> None:
    """Send the line that a null operator waits for."""
    stdin = _pipe(process.stdin)
    stdin.write("\n")
    stdin.flush()


def read_result(process: "subprocess.Popen[str]") -> dict[str, float]:
    """Return the JSON object that a null operator prints at its end."""
    times: dict[str, float] = json.loads(_pipe(process.stdout).readline())
    return times
