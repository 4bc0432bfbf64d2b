"""A machine: namespaces of its own around some services, with a power switch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from testcluster.commands import run_command
from testcluster.errors import TimedOut
from testcluster.linux_namespaces import cgroups
from testcluster.linux_namespaces.network import VethPair
from testcluster.service import Service

_INIT = Path(__file__).with_name("init.py")


@dataclass(frozen=True)
class Machine:
    """One machine of a cluster; its folder holds its disk, its logs and the number of its first process."""

    name: str
    folder: Path
    cgroup: str
    veth: VethPair

    @property
    def var(self) -> Path:
        """Give the machine's disk: /var in there."""
        return self.folder / "var"

    @property
    def pid(self) -> int | None:
        """Give the number of the machine's first process, or None while it is off."""
        try:
            pid = int((self.folder / "pid").read_text())
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(self.folder) in arguments else None

    def start(self, services: Sequence[Service], binds: Sequence[tuple[Path, str]]) -> None:
        """Turn it on; returns when its network is plugged in. Services come up by themselves."""
        for part in ("log", "root", "var"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        (self.folder / "pid").unlink(missing_ok=True)
        (self.folder / "machine.json").write_text(json.dumps(self._spec(services, binds)))
        with (self.folder / "log" / "init.log").open("ab") as out:
            command = [sys.executable, "-ISE", str(_INIT), str(self.folder)]
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, check=False
            )
        if (pid := self.pid) is None:
            raise TimedOut(f"{self.name} did not start; {self.folder}/log/init.log ends: {self.log_tail('init')}")
        self.veth.attach(pid)

    def _spec(self, services: Sequence[Service], binds: Sequence[tuple[Path, str]]) -> dict[str, object]:
        path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        return {
            "name": self.name,
            "cgroup": self.cgroup,
            "address": self.veth.address,
            "routes": self.veth.routes(),
            "binds": [[str(self.folder), str(self.folder)], [str(self.var), "/var"], *([str(a), b] for a, b in binds)],
            "services": [{**asdict(service), "env": path | service.env} for service in services],
        }

    def kill(self) -> None:
        """Turn its power off, now."""
        if pid := self.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A frozen process dies only when it is thawed.
        cgroups.thaw(self.cgroup)
        cgroups.kill(self.cgroup)
        self.veth.detach()
        cgroups.remove(self.cgroup)
        (self.folder / "pid").unlink(missing_ok=True)

    def wipe(self) -> None:
        """Throw its disk away. Half a disk must never look like a whole one, so it is out of sight first."""
        if self.folder.exists():
            thrown = self.folder.with_name(f"thrown-away.{self.name}")
            shutil.rmtree(thrown, ignore_errors=True)
            self.folder.rename(thrown)
            shutil.rmtree(thrown, ignore_errors=True)

    def run(self, *command: str, timeout: float = 600) -> str:
        """Run a command inside; its output. Raises NotReady with its last words when it fails."""
        inside = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--net",
            "--uts",
            "--ipc",
            "--root",
            "--wd=/",
        ]
        return run_command(*inside, *command, called=f"{' '.join(command[:4])} on {self.name}", timeout=timeout)

    def restart(self, program: str) -> None:
        """End a program; init starts it again."""
        for pid in cgroups.members(self.cgroup):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == program[:15]:
                    os.kill(pid, signal.SIGKILL)

    def log_tail(self, service: str) -> str:
        """Give the end of a service's log."""
        try:
            return (self.folder / "log" / f"{service}.log").read_text(errors="replace")[-1500:].strip()
        except OSError:
            return "(no log)"


def wait_until(true: Iterator[bool], seconds: float, otherwise: str) -> None:
    """Ask until the answer is yes; raises NotReady with the words given when time is up."""
    until = time.monotonic() + seconds
    for yes in true:
        if yes:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    raise TimedOut(otherwise)
