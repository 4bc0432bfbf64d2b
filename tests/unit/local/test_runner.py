"""The runner alone: it starts a process, takes commands through a pipe, and records how the process ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from finetune_operator.core.observation import JobState
from finetune_operator.local.job_folder import RUNNER_LOST, is_locked, observe_job
from finetune_operator.local.runner import ENDED, JOB_FILE, STARTED

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
OBEDIENT = STUBBORN.replace("signal.SIG_IGN", "lambda *_: exit(75)")


class Job:
    """A Job folder with a runner, whose stdin is the pipe for commands."""

    def __init__(self, folder: Path, *command: str, grace: float = 0.5) -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        job = {
            "command": command,
            "env": {},
            "folder": str(folder),
            "graceSeconds": grace,
        }
        (self.folder / JOB_FILE).write_text(json.dumps(job))
        self.runner = self.start_runner()

    def start_runner(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "finetune_operator.local.runner", str(self.folder)],
            stdin=subprocess.PIPE,
        )

    def wait_until_up(self) -> None:
        wait_for(
            lambda: (
                "up" in (self.folder / "log").read_text()
                if (self.folder / "log").exists()
                else False
            )
        )

    def send(self, command: str) -> None:
        assert self.runner.stdin
        self.runner.stdin.write(f"{command}\n".encode())
        self.runner.stdin.flush()

    def ended(self) -> dict[str, Any]:
        self.runner.wait(30)
        record: dict[str, Any] = json.loads((self.folder / ENDED).read_text())
        return record

    @property
    def pid(self) -> int:
        return int(json.loads((self.folder / STARTED).read_text())["pid"])


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_eviction_allows_grace_and_is_a_disruption(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(OBEDIENT), grace=30)
    job.wait_until_up()
    assert is_locked(job.folder)
    job.send("evict the node is reclaimed")
    ended = job.ended()
    assert (ended["code"], ended["disruption"]) == (75, "the node is reclaimed")
    assert not is_locked(job.folder)


def test_process_that_ignores_sigterm_is_killed_after_grace(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(STUBBORN))
    job.wait_until_up()
    job.send("evict please")
    began = time.monotonic()
    assert job.ended()["code"] == 137
    assert time.monotonic() - began > 0.4


def test_stop_is_no_disruption(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(OBEDIENT))
    job.wait_until_up()
    job.send("stop")
    assert job.ended()["disruption"] is None


def test_closed_pipe_evicts_the_process(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(OBEDIENT))
    job.wait_until_up()
    assert job.runner.stdin
    job.runner.stdin.close()
    ended = job.ended()
    assert ended["code"] == 75
    assert "the finetune command that started it is gone" in ended["disruption"]


def test_killed_runner_ends_its_process_as_a_disruption(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(STUBBORN))
    job.wait_until_up()
    pid = job.pid
    job.runner.kill()
    job.runner.wait()
    wait_for(lambda: not is_alive(pid))
    observed = observe_job(job.folder)
    assert observed
    assert (observed.state, observed.disruption, observed.exit_code) == (
        JobState.FAILED,
        RUNNER_LOST,
        None,
    )
    assert job.start_runner().wait(30) == 0  # a second runner does not start it again
    assert not (job.folder / ENDED).exists()


def test_leftover_child_processes_are_killed(tmp_path: Path) -> None:
    sleeper = "[sys.executable,'-c','import time; time.sleep(60)']"
    code = f"import subprocess,sys; p=subprocess.Popen({sleeper}); print(p.pid)"
    job = Job(tmp_path, *python(code))
    assert job.ended()["code"] == 0
    _, pid = (job.folder / "log").read_text().split()
    wait_for(lambda: not is_alive(int(pid)))


def test_two_runners_start_a_job_once(tmp_path: Path) -> None:
    job = Job(tmp_path, *python("print('up'); import time; time.sleep(0.5)"))
    second = job.start_runner()
    assert job.ended()["code"] == 0
    assert second.wait(30) == 0
    assert (job.folder / "log").read_text().count("up") == 1


def test_missing_program_is_named_in_the_log(tmp_path: Path) -> None:
    job = Job(tmp_path, "no-such-program")
    assert job.ended()["code"] == 127
    assert "cannot start no-such-program" in (job.folder / "log").read_text()


def test_signal_is_recorded_as_128_plus_its_number(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(STUBBORN))
    job.wait_until_up()
    os.kill(job.pid, signal.SIGKILL)  # from outside, as the kernel's OOM killer does
    ended = job.ended()
    assert (ended["code"], ended["disruption"]) == (137, None)


def test_job_that_never_started_is_not_observed(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    assert observe_job(tmp_path / "job") is None
