"""The runner alone: a process, orders through a pipe, and how it ended, written down."""

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
    def __init__(self, folder: Path, *command: str, grace: float = 0.5) -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        order = {"command": command, "env": {}, "folder": str(folder), "graceSeconds": grace}
        (self.folder / JOB_FILE).write_text(json.dumps(order))
        self.runner = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "finetune_operator.local.runner", str(self.folder)], stdin=subprocess.PIPE
        )

    def up(self) -> None:
        wait_for(lambda: "up" in (self.folder / "log").read_text() if (self.folder / "log").exists() else False)

    def order(self, words: str) -> None:
        assert self.runner.stdin
        self.runner.stdin.write(f"{words}\n".encode())
        self.runner.stdin.flush()

    def ended(self) -> dict[str, Any]:
        self.runner.wait(30)
        found: dict[str, Any] = json.loads((self.folder / ENDED).read_text())
        return found

    @property
    def pid(self) -> int:
        return int(json.loads((self.folder / STARTED).read_text())["pid"])


def wait_for(met: Any) -> None:
    until = time.monotonic() + 30
    while not met():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_an_eviction_gives_the_process_time_and_is_evidence(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(OBEDIENT), grace=30)
    job.up()
    assert is_locked(job.folder)
    job.order("evict the node is wanted back")
    ended = job.ended()
    assert (ended["code"], ended["disruption"]) == (75, "the node is wanted back")
    assert not is_locked(job.folder)


def test_who_does_not_obey_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(STUBBORN))
    job.up()
    job.order("evict please")
    began = time.monotonic()
    assert job.ended()["code"] == 137
    assert time.monotonic() - began > 0.4


def test_to_be_asked_to_stop_is_no_evidence_of_a_disruption(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(OBEDIENT))
    job.up()
    job.order("stop")
    assert job.ended()["disruption"] is None


def test_when_the_one_who_asked_is_killed_the_process_is_evicted(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(OBEDIENT))
    job.up()
    assert job.runner.stdin
    job.runner.stdin.close()
    ended = job.ended()
    assert ended["code"] == 75
    assert "was killed" in ended["disruption"]


def test_a_killed_runner_takes_its_process_along_and_the_job_is_seen_as_disrupted(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(STUBBORN))
    job.up()
    pid = job.pid
    job.runner.kill()
    job.runner.wait()
    wait_for(lambda: not is_alive(pid))
    found = observe_job(job.folder)
    assert found
    assert (found.state, found.disruption, found.exit_code) == (JobState.FAILED, RUNNER_LOST, None)
    assert job.start().wait(30) == 0  # a second runner leaves it as it is
    assert not (job.folder / ENDED).exists()


def test_what_a_process_left_behind_is_killed_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess,sys; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)']); print(p.pid)"
    )
    job = Job(tmp_path, *python(code))
    assert job.ended()["code"] == 0
    wait_for(lambda: not is_alive(int((job.folder / "log").read_text())))


def test_two_runners_run_a_job_once(tmp_path: Path) -> None:
    job = Job(tmp_path, *python("print('up'); import time; time.sleep(0.5)"))
    second = job.start()
    assert job.ended()["code"] == 0
    assert second.wait(30) == 0
    assert (job.folder / "log").read_text().count("up") == 1


def test_a_program_that_is_not_there_is_named_in_the_log(tmp_path: Path) -> None:
    job = Job(tmp_path, "no-such-program")
    assert job.ended()["code"] == 127
    assert "cannot start no-such-program" in (job.folder / "log").read_text()


def test_a_signal_is_told_as_a_shell_tells_it(tmp_path: Path) -> None:
    job = Job(tmp_path, *python(STUBBORN))
    job.up()
    os.kill(job.pid, signal.SIGKILL)  # from outside, as the kernel does when memory is short
    ended = job.ended()
    assert (ended["code"], ended["disruption"]) == (137, None)


def test_a_job_that_was_never_started_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    assert observe_job(tmp_path / "job") is None
