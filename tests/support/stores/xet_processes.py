"""Processes that push to a hub with xet and fetch from it, each with an empty home as in a new pod."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.stores.hub_environment import process_environment
from support.stores.hub_state import Hub, Repository
from support.stores.models import MIB, contents

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.files import write_durably
from finetune_trainer.runtime.artifacts import seal

ROOT = Path(__file__).resolve().parents[3]
NAME = "people/bot"
URI = "hf://people/bot"
LARGE = 66 * MIB
SMALLER = 2 * MIB
OVERHEAD = 1.01
"""Bytes of xorbs for each byte of a file that cannot be compressed."""
SECONDS = 120


@dataclass(frozen=True)
class XetModel:
    folder: Path
    digest: str

    def start_push(
        self, hub: Hub, uri: str = URI, **variables: str
    ) -> subprocess.Popen[str]:
        return start(hub, "push", uri, str(self.folder), self.digest, **variables)

    def push(self, hub: Hub, uri: str = URI, **variables: str) -> tuple[str, int]:
        """Push the model; return where it is, and how many bytes the push says that it has sent."""
        published, sent = output_of(self.start_push(hub, uri, **variables)).split()
        return published, int(sent)


def make_model(folder: Path, **more: bytes) -> XetModel:
    files = {
        "config.json": b"{}",
        "a.safetensors": os.urandom(LARGE),
        "b.safetensors": os.urandom(SMALLER),
    }
    for name, content in (files | more).items():
        write_durably(folder / name, content)
    return XetModel(folder, seal(folder, {"stage": "push"}))


def start(hub: Hub, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    home = tempfile.mkdtemp(dir=hub.folder)
    impatient = {
        "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2",
        "HF_XET_CLIENT_RETRY_BASE_DELAY": "20ms",
    }
    chosen = (
        {"HF_HOME": home, "HF_XET_CACHE": f"{home}/xet", "HF_HUB_DISABLE_XET": "0"}
        | impatient
        | variables
    )
    return subprocess.Popen(
        [sys.executable, "-m", "support.stores.hub_process", *arguments],
        env=process_environment(hub) | chosen,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return output.strip()


def error_of(process: subprocess.Popen[str], code: ExitCode) -> str:
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == code, errors
    return errors.strip()


def fetch(hub: Hub, cache: Path, **variables: str) -> dict[str, bytes]:
    files = contents(Path(output_of(start(hub, "fetch", URI, str(cache), **variables))))
    files.pop(".gitattributes")
    return files


def repository(hub: Hub, name: str = NAME) -> Repository:
    pushed = hub.repository(name)
    assert pushed
    return pushed


def kill_when(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Kill a process when a condition is true."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def begun(cache: Path, name: str) -> Callable[[], int]:
    """Return what reads the size of a file that is being fetched."""
    return lambda: sum(part.stat().st_size for part in cache.rglob(f"{name}.part"))
