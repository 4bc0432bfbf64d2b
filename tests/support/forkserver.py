"""Processes of the train stage that start in milliseconds, to be killed in earnest.

Importing torch, transformers and peft takes seconds. One process does it once and forks for every run; it
has a single thread when it forks, so the child is as good as a new process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


class ForkServer:
    """Starts train stages, one at a time."""

    def __init__(self) -> None:
        variables = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("trainer", "tests")),
        }
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("prefork.py")],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, config: Any, environment: Any, log: Path, **disk: float) -> "Forked":
        request = {
            "variables": environment.variables() | {"FINETUNE_CONFIG": config.model_dump_json(by_alias=True)},
            "log": str(log),
            **disk,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Forked(int(self.answer()), self, log)

    def answer(self) -> str:
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)


class Forked:
    """A running train stage."""

    def __init__(self, pid: int, server: ForkServer, log: Path) -> None:
        self.pid, self._server, self.log = pid, server, log

    def kill(self, number: int = signal.SIGTERM) -> None:
        """Nothing happens where it has ended: its parent has not yet been told to forget it."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self) -> int:
        """Give the exit code; minus the signal's number where one ended it."""
        return int(self._server.answer())

    def is_running(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    def until(self, moment: Callable[[], bool], seconds: float = 20) -> bool:
        """Wait for a moment; False where the process ended before it came."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if moment():
                return True
            if not self.is_running():
                return False
            time.sleep(0.001)
        raise TimeoutError("the moment never came")
