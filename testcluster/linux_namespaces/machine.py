"""A machine: a set of Linux namespaces with services in them, which can be powered on and off."""

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

_INIT = Path(__file__).with_name("machine_init.py")


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster; its folder holds its disk, its logs and the pid of its first process."""

    name: str
    folder: Path
    cgroup: str
    veth: VethPair

    @property
    def var(self) -> Path:
        """Return the machine's disk, which is mounted as its /var."""
        return self.folder / "var"

    @property
    def pid(self) -> int | None:
        """Return the pid of the machine's first process, or None while the machine is off."""
        try:
            pid = int((self.folder / "pid").read_text())
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        # The pid may have been reused by another process, whose arguments do not name this folder.
        return pid if os.fsencode(self.folder) in arguments else None

    def start(
        self, services: Sequence[Service], binds: Sequence[tuple[Path, str]]
    ) -> None:
        """Power the machine on and attach its network. Does not wait for its services. Raises TimedOut."""
        for part in ("log", "root", "var"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        (self.folder / "pid").unlink(missing_ok=True)
        (self.folder / "machine.json").write_text(
            json.dumps(self._spec(services, binds))
        )
        with (self.folder / "log" / "init.log").open("ab") as out:
            command = [sys.executable, "-ISE", str(_INIT), str(self.folder)]
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                check=False,
            )
        pid = self.pid
        if pid is None:
            raise TimedOut(
                f"{self.name} did not start; {self.folder}/log/init.log ends with: {self.log_tail('init')}"
            )
        self.veth.attach(pid)

    def _spec(
        self, services: Sequence[Service], binds: Sequence[tuple[Path, str]]
    ) -> dict[str, object]:
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
        }
        return {
            "name": self.name,
            "cgroup": self.cgroup,
            "address": self.veth.address,
            "routes": self.veth.routes(),
            "binds": [
                [str(self.folder), str(self.folder)],
                [str(self.var), "/var"],
                *([str(source), target] for source, target in binds),
            ],
            "services": [
                {**asdict(service), "env": environment | service.env}
                for service in services
            ],
        }

    def kill(self) -> None:
        """Power the machine off, whatever state it is in."""
        pid = self.pid
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # SIGKILL takes effect on a frozen process only when it is thawed.
        cgroups.thaw(self.cgroup)
        cgroups.kill(self.cgroup)
        self.veth.detach()
        cgroups.remove(self.cgroup)
        (self.folder / "pid").unlink(missing_ok=True)

    def wipe(self) -> None:
        """Delete the machine's folder.

        It is renamed first, so that a half-deleted disk is never taken for a complete one.
        """
        if self.folder.exists():
            deleted = self.folder.with_name(f"deleted.{self.name}")
            shutil.rmtree(deleted, ignore_errors=True)
            self.folder.rename(deleted)
            shutil.rmtree(deleted, ignore_errors=True)

    def run(self, *command: str, timeout: float = 600) -> str:
        """Run a command on the machine and return its output. Raises TimedOut with the end of its output."""
        nsenter = [
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
        return run_command(
            *nsenter,
            *command,
            called=f"{' '.join(command[:4])} on {self.name}",
            timeout=timeout,
        )

    def restart(self, program: str) -> None:
        """Kill a program; machine_init.py starts it again."""
        for pid in cgroups.members(self.cgroup):
            with suppress(OSError):
                if (
                    Path(f"/proc/{pid}/comm").read_text().strip() == program[:15]
                ):  # the kernel cuts names to 15 characters
                    os.kill(pid, signal.SIGKILL)

    def log_tail(self, service: str) -> str:
        """Return the end of a service's log."""
        try:
            return (
                (self.folder / "log" / f"{service}.log")
                .read_text(errors="replace")[-1500:]
                .strip()
            )
        except OSError:
            return "(no log)"


def wait_until(results: Iterator[bool], seconds: float, otherwise: str) -> None:
    """Wait until the iterator yields True. Raises TimedOut with `otherwise` after `seconds`."""
    deadline = time.monotonic() + seconds
    for result in results:
        if result:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    raise TimedOut(otherwise)
