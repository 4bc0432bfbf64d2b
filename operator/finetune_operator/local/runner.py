"""The runner of one Job: starts its process, executes commands, and records how the process ended.

Run as `python -m finetune_operator.local.runner JOB_FOLDER`, a process of its own (ADR 3). The `finetune` command that
started it may be killed at any moment. Its end of the pipe then closes, and the runner evicts the process.
The runner locks the folder while it lives. The lock tells a running Job from a Job with a killed runner.
"""

import contextlib
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

JOB_FILE = "job.json"
LOCK = "lock"
STARTED = "started.json"
ENDED = "ended.json"
LOG = "log"
TERMINATION = "termination.json"
PROGRESS = "progress.json"

# Commands, each in a line on stdin or in the named pipe: `stop`, `evict REASON` or `kill REASON`.
STOP = "stop"
EVICT = "evict"
KILL = "kill"
COMMANDS = "commands"
"""A named pipe for commands of other processes than the process that started the runner."""

LEFTOVERS_SECONDS = 5.0
"""How long the runner tries to kill the processes that the Job's process left behind."""
CANNOT_START = 127
"""The exit code of a shell for a command that it cannot find."""


@dataclass
class Supervisor:
    """The process group of a Job, and what the commands received so far require."""

    group: int
    """The process group of the Job."""
    grace: float
    """Seconds from SIGTERM to SIGKILL."""
    disruption: str | None = None
    """The reason of an eviction or a kill; None: the process ended by itself or was stopped."""
    kill_at: float | None = None
    """When SIGKILL follows SIGTERM, by the monotonic clock."""

    def handle(self, line: str) -> None:
        """Execute one command: stop and evict allow the grace period, kill does not; only stop is no disruption."""
        command, _, reason = line.strip().partition(" ")
        match command:
            case "stop" | "evict":
                self.disruption = reason or self.disruption
                if self.kill_at is None:
                    self.kill_at = time.monotonic() + self.grace
                    self.send(signal.SIGTERM)
            case "kill":
                self.disruption = reason or self.disruption
                self.send(signal.SIGKILL)
            case _:
                print(
                    f"unknown command {line!r}: must be stop, evict REASON or kill REASON",
                    file=sys.stderr,
                )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process of the Job."""
        try:
            os.killpg(self.group, number)
        except (ProcessLookupError, PermissionError):
            # macOS returns EPERM for a group that contains only zombies.
            return


def main(folder: Path) -> None:
    """Run the Job in this folder, unless it was started before."""
    lock = lock_folder(folder)
    if (folder / ENDED).exists() or (folder / STARTED).exists():
        return
    job = json.loads((folder / JOB_FILE).read_bytes())
    commands = open_commands(folder)
    # Unbuffered: a reader follows the log.
    with (folder / LOG).open("ab", buffering=0) as log:
        try:
            child = start(job)
        except OSError as error:
            message = f"cannot start {job['command'][0]}: {error}"
            log.write(f"{message}\n".encode())
            record_start_failure(folder, message)
            return
        write_record(folder / STARTED, pid=child.pid)
        supervisor = Supervisor(group=child.pid, grace=job["graceSeconds"])
        copying = copy_output(child, log)
        code = supervise(child, supervisor, commands)
        # A process that has left the group may keep the other end open.
        copying.join(LEFTOVERS_SECONDS)
    # 128 + signal, as in a shell and in a pod. The record comes before the release of the lock: otherwise a reader
    # could find neither of them and take the runner for lost.
    exit_code = code if code >= 0 else 128 - code
    write_record(folder / ENDED, code=exit_code, disruption=supervisor.disruption)
    (folder / COMMANDS).unlink(missing_ok=True)
    lock.close()


def lock_folder(folder: Path) -> IO[str]:
    """Lock the folder and return the open lock; wait while another runner holds it."""
    lock = (folder / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def open_commands(folder: Path) -> int | None:
    """Create the named pipe and return its descriptor, or None on a file system that has no named pipes."""
    pipe = folder / COMMANDS
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        # Open for writing, too: a pipe whose last writer has closed it would be readable, and empty, for ever.
        return os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None


def send_command(folder: Path, command: str) -> None:
    """Send a command to the runner of a folder, from any process of its user; raises OSError if no runner reads it."""
    pipe = os.open(folder / COMMANDS, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(pipe, f"{command}\n".encode())
    finally:
        os.close(pipe)


def write_record(path: Path, **facts: Any) -> None:
    """Write facts durably, with the current time as `at`."""
    now = datetime.now(UTC)  # noqa: TID251  an edge
    write_durably(path, json.dumps({"at": now.isoformat(), **facts}).encode())


def record_start_failure(folder: Path, message: str) -> None:
    """Record that the Job's process never started; the reason is written as its termination message."""
    write_durably(
        folder / TERMINATION, json.dumps({"failure": {"message": message}}).encode()
    )
    write_record(folder / ENDED, code=CANNOT_START, disruption=None)


def copy_output(child: subprocess.Popen[bytes], log: IO[bytes]) -> threading.Thread:
    """Start a thread that copies the output of a process to the log, each line behind its time."""
    output = child.stdout
    if output is None:
        raise TypeError("the output of the process is no pipe")

    def copy() -> None:
        for line in output:
            now = datetime.now(UTC)  # noqa: TID251  an edge
            # As the log API of Kubernetes has times: RFC 3339, here in whole seconds.
            time_text = now.strftime("%Y-%m-%dT%H:%M:%SZ")
            # On a full disk, a lost line must not block the process.
            with contextlib.suppress(OSError):
                log.write(f"{time_text} ".encode() + line)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the Job's process in a process group of its own."""
    return subprocess.Popen(
        job["command"],
        env={**os.environ, **job["env"]},
        cwd=job["folder"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509  no thread has been started yet
    )


def supervise(
    child: subprocess.Popen[bytes], supervisor: Supervisor, commands: int | None = None
) -> int:
    """Execute commands until the process and its group are gone; return its exit code, negative after a signal."""
    wake_reader, wake_writer = os.pipe()

    def wait_for_exit() -> None:
        child.wait()
        os.write(wake_writer, b"e")

    # SIGTERM comes at the shutdown of the machine. The handler only wakes the loop, which may then send signals.
    signal.signal(signal.SIGTERM, lambda *_: os.write(wake_writer, b"t"))
    threading.Thread(target=wait_for_exit, daemon=True).start()
    inputs = [wake_reader, sys.stdin.fileno()]
    if commands is not None:
        inputs.append(commands)
    while True:
        timeout = None
        if supervisor.kill_at:
            timeout = max(0.0, supervisor.kill_at - time.monotonic())
        ready, _, _ = select.select(inputs, [], [], timeout)
        wake_bytes = os.read(wake_reader, 64) if wake_reader in ready else b""
        # First: a process that has ended needs no more commands.
        if b"e" in wake_bytes:
            break
        if b"t" in wake_bytes:
            supervisor.handle(f"{EVICT} the machine is shutting down")
        if commands is not None and commands in ready:
            _execute(os.read(commands, 4096).decode(), supervisor)
        if sys.stdin.fileno() in ready and not _read_commands(supervisor):
            inputs.remove(sys.stdin.fileno())
        if supervisor.kill_at and time.monotonic() >= supervisor.kill_at:
            supervisor.send(signal.SIGKILL)
    _clear_group(supervisor)
    return child.returncode


def _read_commands(supervisor: Supervisor) -> bool:
    """Execute the commands on stdin; return False when its other end is closed."""
    text = os.read(sys.stdin.fileno(), 4096).decode()
    _execute(text, supervisor)
    if not text and supervisor.kill_at is None:
        supervisor.handle(
            f"{EVICT} the finetune command that started it is gone; it may have been killed"
        )
    return bool(text)


def _execute(text: str, supervisor: Supervisor) -> None:
    for line in text.splitlines():
        supervisor.handle(line)


def _clear_group(supervisor: Supervisor) -> None:
    """Kill the processes that the Job's process left behind: a Job that has ended must have no process."""
    deadline = time.monotonic() + LEFTOVERS_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(supervisor.group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
