"""Watches over one Job's process: starts it, obeys orders, and writes down how it ended.

Run as `python -m finetune_operator.local.runner JOB_FOLDER`, a process of its own: whoever asked
for the Job may be killed at any moment, and then its end of the pipe closes, which is an order to evict.
Holds a lock on the folder while it lives, so that anyone can tell a running Job from one whose runner died.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from finetune_trainer.files import write_durably
from finetune_trainer.parent_death import die_with_parent

JOB_FILE, LOCK, STARTED, ENDED, LOG = "job.json", "lock", "started.json", "ended.json", "log"
TERMINATION, PROGRESS = "termination.json", "progress.json"

STOP, EVICT, KILL = "stop", "evict", "kill"
"""Orders, one a line on stdin: stop; evict WHY; kill WHY."""

LEFTOVERS_SECONDS = 5.0
CANNOT_START = 127
"""What a shell says of a program that is not there."""


@dataclass
class Supervisor:
    """What has been ordered, and what follows from it."""

    group: int
    grace: float
    disruption: str | None = None
    kill_at: float | None = None

    def handle(self, order: str) -> None:
        """Stop and evict give the grace period; kill gives none. Only an eviction is no fault of the process."""
        verb, _, why = order.strip().partition(" ")
        match verb:
            case "stop" | "evict":
                self.disruption = why or self.disruption
                if self.kill_at is None:
                    self.kill_at = time.monotonic() + self.grace
                    self.send(signal.SIGTERM)
            case "kill":
                self.disruption = why or self.disruption
                self.send(signal.SIGKILL)
            case _:
                print(f"unknown order: {order!r}", file=sys.stderr)

    def send(self, number: signal.Signals) -> None:
        """Signal every process of the Job."""
        try:
            os.killpg(self.group, number)
        except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group that has only zombies
            return


def main(folder: Path) -> None:
    """Run the Job in this folder, unless it has run."""
    lock = lock_folder(folder)
    if (folder / ENDED).exists() or (folder / STARTED).exists():
        return
    order = json.loads((folder / JOB_FILE).read_bytes())
    with (folder / LOG).open("ab") as log:
        try:
            child = start(order, log)
        except OSError as error:
            words = f"cannot start {order['command'][0]}: {error}"
            log.write(f"{words}\n".encode())
            record_start_failure(folder, words)
            return
    write_record(folder / STARTED, pid=child.pid)
    watch = Supervisor(group=child.pid, grace=order["graceSeconds"])
    code = supervise(child, watch)
    write_record(folder / ENDED, code=code if code >= 0 else 128 - code, disruption=watch.disruption)
    lock.close()


def lock_folder(folder: Path) -> IO[str]:
    """Take the folder's lock; wait for a runner that has it."""
    lock = (folder / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def write_record(path: Path, **facts: Any) -> None:
    """Write down a fact of this moment."""
    now = datetime.now(UTC)  # noqa: TID251  an edge
    write_durably(path, json.dumps({"at": now.isoformat(), **facts}).encode())


def record_start_failure(folder: Path, words: str) -> None:
    """Write down that the Job's process was never there, and why, in the place of its own last words."""
    write_durably(folder / TERMINATION, json.dumps({"failure": {"message": words}}).encode())
    write_record(folder / ENDED, code=CANNOT_START, disruption=None)


def start(order: dict[str, Any], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the Job's process in a group of its own."""
    return subprocess.Popen(
        order["command"],
        env={**os.environ, **order["env"]},
        cwd=order["folder"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509  no thread has been started yet
    )


def supervise(child: subprocess.Popen[bytes], watch: Supervisor) -> int:
    """Obey orders until the process and all of its group are gone; give its exit code."""
    awake, wake = os.pipe()

    def wait() -> None:
        child.wait()
        os.write(wake, b"e")

    signal.signal(signal.SIGTERM, lambda *_: os.write(wake, b"t"))  # the machine shuts down
    threading.Thread(target=wait, daemon=True).start()
    listening = [awake, sys.stdin.fileno()]
    while True:
        left = max(0.0, watch.kill_at - time.monotonic()) if watch.kill_at else None
        ready, _, _ = select.select(listening, [], [], left)
        if awake in ready and b"e" in (woken := os.read(awake, 64)):
            break
        if awake in ready and b"t" in woken:
            watch.handle(f"{EVICT} the machine is shutting down")
        if sys.stdin.fileno() in ready and not _read_commands(watch):
            listening.remove(sys.stdin.fileno())
        if watch.kill_at and time.monotonic() >= watch.kill_at:
            watch.send(signal.SIGKILL)
    _clear_group(watch)
    return child.returncode


def _read_commands(watch: Supervisor) -> bool:
    """Obey what came through the pipe; False when its other end is closed."""
    heard = os.read(sys.stdin.fileno(), 4096).decode()
    for order in heard.splitlines():
        watch.handle(order)
    if not heard and watch.kill_at is None:
        watch.handle(f"{EVICT} the command that ran the pipeline was killed")
    return bool(heard)


def _clear_group(watch: Supervisor) -> None:
    """Kill what the process left behind, so that a Job that is over has no process."""
    until = time.monotonic() + LEFTOVERS_SECONDS
    while time.monotonic() < until:
        try:
            os.killpg(watch.group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
