"""Stages as real processes that start in milliseconds, so that tests can kill them.

Importing torch, transformers and peft takes seconds. The process of prefork.py imports them once and forks for every
run. It has a single thread when it forks, so a child behaves like a new process.
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

REPOSITORY = Path(__file__).parents[3]


class ForkServer:
    """The client of a prefork process; starts stages, also several at a time."""

    def __init__(self, *modules: str) -> None:
        """Start the prefork process, which also imports these modules."""
        # Not the service of W&B that a test in this process has started, and that ends with it.
        variables = {
            name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"
        } | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(
                str(REPOSITORY / part) for part in ("trainer", "tests")
            ),
        }
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("prefork.py"), *modules],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self, config: Any, environment: Any, log: Path, **options: object
    ) -> "ForkedStage":
        """Start the config's stage, which appends its output to `log`.

        `options` may limit its file system: `slow_disk`, seconds that an fsync takes, `slow_names`, seconds that a
        rename or a new link takes, `largest_file`, bytes, and `exchange=False`. `constants` sets module constants by
        their full names. `freeze`, a function's full name and a number, stops the process before that call of it.
        `hang`, too, does not come back from that call, nor does `hang_in_c`, which keeps Python's lock. `slow`, a
        function's full name and seconds, waits before each call. `locks=False` is a file system without locks.
        To the file `tokenized`, each tokenized text is appended.
        `ranks` processes train together. `processes` is the number of processes that tokenize, however little there is.
        """
        variables = environment.variables() | {
            "FINETUNE_CONFIG": config.model_dump_json(by_alias=True)
        }
        request = {
            "stage": config.stage,
            "variables": variables,
            "log": str(log),
            **options,
        }
        return ForkedStage(int(self.request(request)), self, log)

    def request(self, request: dict[str, object]) -> str:
        """Send a request to the prefork process and return its answer."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the prefork process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


class ForkedStage:
    """A running stage."""

    def __init__(self, pid: int, server: ForkServer, log: Path) -> None:
        self.pid = pid
        self._server = server
        self.log = log

    def kill(self, number: int = signal.SIGTERM) -> None:
        """Send a signal; do nothing if the process has ended."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def other_ranks(self) -> list[int]:
        """Return the pids of the processes that train beside this process."""
        try:
            return [
                int(pid)
                for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children")
                .read_text()
                .split()
            ]
        except OSError:
            return []

    def wait(self) -> int:
        """Wait for the process to end; return its exit code, or the negative number of the signal that killed it."""
        return int(self._server.request({"wait": self.pid}))

    def is_running(self) -> bool:
        """Return whether the process has not ended; a zombie has."""
        try:
            state = (
                Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            )
        except OSError:
            return False
        return state != "Z"

    def is_frozen(self) -> bool:
        """Return whether SIGSTOP has stopped the process."""
        try:
            return (
                Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
                == "T"
            )
        except OSError:
            return False

    def until(self, condition: Callable[[], bool], seconds: float = 20) -> bool:
        """Wait until the condition holds; return False if the process ended before that."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            if not self.is_running():
                return False
            time.sleep(0.001)
        raise TimeoutError(f"the condition did not hold within {seconds} seconds")
