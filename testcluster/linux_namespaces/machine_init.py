"""The first process of a machine: `machine_init.py FOLDER` creates its namespaces and root, and restarts its services.

It imports the standard library only, because it must start in milliseconds. Its configuration is FOLDER/machine.json,
written by machine.py. When this process exits, the kernel kills every process in its pid namespace. The mounts and the
network of the machine go with the last process.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 1
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SHARED = 1 << 20
MNT_DETACH = 2
OWN_FOLDERS = (
    "proc",
    "sys",
    "dev",
    "run",
    "tmp",
    "var",
    "mnt",
    "media",
    "lost+found",
    "boot",
)
KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Settings of the whole host that a kubelet writes unless they have these values."""
PAUSE_BEFORE_RESTART = 0.3
"""Seconds between the exit of a service and its restart."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> None:
    """Raise OSError with errno when a libc call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def mount(
    source: str,
    target: Path,
    kind: str | None = None,
    flags: int = 0,
    data: str | None = None,
) -> None:
    """Mount a file system by the system call. Raises OSError."""

    def encoded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    result = libc.mount(
        source.encode(),
        os.fsencode(target),
        encoded(kind),
        ctypes.c_ulong(flags),
        encoded(data),
    )
    check(result, f"mount {source} on {target}")


def main(folder: Path) -> None:
    """Create the namespaces, and boot in a child, which is the first process of the new pid namespace."""
    spec = json.loads((folder / "machine.json").read_text())
    hierarchies = join_cgroups(spec["cgroup"])
    namespaces = (
        CLONE_NEWNS
        | CLONE_NEWCGROUP
        | CLONE_NEWUTS
        | CLONE_NEWIPC
        | CLONE_NEWPID
        | CLONE_NEWNET
    )
    check(libc.unshare(ctypes.c_int(namespaces)), "unshare")
    child = os.fork()
    if child:
        # Written by the parent, because inside the namespace the child's pid is 1.
        (folder / "pid.new").write_text(str(child))
        (folder / "pid.new").replace(folder / "pid")
        os._exit(0)
    boot(folder, spec, hierarchies)


def join_cgroups(name: str) -> list[dict[str, str]]:
    """Enter a new group in every hierarchy, so that every process of the machine can be found, frozen and counted."""
    hierarchies = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        if kind not in {"cgroup", "cgroup2"}:
            continue
        mount_point = Path(left.split()[4])
        group = mount_point / name
        group.mkdir(parents=True, exist_ok=True)
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            # A new cpuset group of version 1 is empty, and no process can enter it before it is filled.
            if kind == "cgroup" and (mount_point / inherited).exists():
                (group / inherited).write_text((mount_point / inherited).read_text())
        (group / "cgroup.procs").write_text(str(os.getpid()))
        hierarchies.append(
            {"at": str(mount_point), "kind": kind, "options": cgroup_options(options)}
        )
    return hierarchies


def cgroup_options(options: str) -> str:
    """Return the options that mount the same hierarchy again; a named hierarchy without controllers needs `none`."""
    kept = [
        option
        for option in options.split(",")
        if option not in {"rw", "ro", "relatime", "nsdelegate"}
    ]
    named = any(option.startswith("name=") for option in kept)
    return ",".join(["none", *kept] if named else kept)


def boot(folder: Path, spec: dict[str, Any], hierarchies: list[dict[str, str]]) -> None:
    """Set up the machine and run its services; does not return."""
    os.setsid()
    name = spec["name"].encode()
    check(libc.sethostname(name, len(name)), "sethostname")
    make_root(folder / "root", spec["binds"])
    mount_kernel_views(hierarchies)
    configure_network(spec)
    supervise(spec["services"], folder / "log")


def make_root(root: Path, binds: list[list[str]]) -> None:
    """Create the machine's root: the host's programs read-only, and its own /var, /run and /tmp."""
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
    mount("machine", root, "tmpfs", 0, "mode=755,size=64m")
    for entry in sorted(os.scandir("/"), key=lambda item: item.name):
        if entry.name in OWN_FOLDERS:
            continue
        inside = root / entry.name
        if entry.is_symlink():
            inside.symlink_to(Path(entry.path).readlink())
        elif entry.is_dir():
            inside.mkdir()
            mount(entry.path, inside, None, MS_BIND | MS_REC)
            mount("none", inside, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    for own in OWN_FOLDERS:
        (root / own).mkdir(exist_ok=True)
    mount("/dev", root / "dev", None, MS_BIND | MS_REC)
    mount("run", root / "run", "tmpfs", 0, "mode=755,size=512m")
    mount("tmp", root / "tmp", "tmpfs", 0, "mode=1777,size=512m")
    for source, target in binds:
        inside = root / target.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        mount(source, inside, None, MS_BIND)
    mount("proc", root / "proc", "proc")
    mount("sys", root / "sys", "sysfs")
    pivot_root(root)


def pivot_root(root: Path) -> None:
    """Make the new root the root of the machine, and detach the host's."""
    (root / "mnt" / "old").mkdir()
    subprocess.run(["pivot_root", str(root), str(root / "mnt/old")], check=True)
    os.chdir("/")
    check(libc.umount2(b"/mnt/old", MNT_DETACH), "umount /mnt/old")
    Path("/mnt/old").rmdir()
    # Shared, because containers must see volumes that the kubelet mounts later.
    mount("none", Path("/"), None, MS_REC | MS_SHARED)


def mount_kernel_views(hierarchies: list[dict[str, str]]) -> None:
    """Mount the machine's own cgroups, and make kernel settings read-only except the settings of its own network."""
    mount("cgroup", Path("/sys/fs/cgroup"), "tmpfs", 0, "mode=755")
    for hierarchy in hierarchies:
        at = Path(hierarchy["at"])
        at.mkdir(parents=True, exist_ok=True)
        mount(
            "cgroup",
            at,
            hierarchy["kind"],
            0,
            hierarchy["options"] if hierarchy["kind"] == "cgroup" else None,
        )
        if hierarchy["kind"] == "cgroup2":
            delegate_cgroups(at)
        for alias in (
            hierarchy["options"].split(",") if "," in hierarchy["options"] else []
        ):
            if (
                not (at.parent / alias).exists()
                and alias != "none"
                and "=" not in alias
            ):
                (at.parent / alias).symlink_to(at.name)
    cover_sysctls()
    mount("/proc/sys", Path("/proc/sys"), None, MS_BIND | MS_REC)
    mount("/proc/sys/net", Path("/proc/sys/net"), None, MS_BIND)
    mount("none", Path("/proc/sys"), None, MS_BIND | MS_REMOUNT | MS_RDONLY)


def cover_sysctls() -> None:
    """Cover the settings that the kubelet would change for the whole host with files that have the expected values."""
    for name, value in KUBELET_SYSCTLS.items():
        cover = Path("/run/settings") / name
        cover.parent.mkdir(parents=True, exist_ok=True)
        cover.write_text(f"{value}\n")
        if (Path("/proc/sys") / name).exists():
            mount(str(cover), Path("/proc/sys") / name, None, MS_BIND)


def delegate_cgroups(group: Path) -> None:
    """Move this process into a leaf group and delegate the controllers.

    In version 2 a group that delegates controllers may not contain processes.
    """
    controllers = (group / "cgroup.controllers").read_text().split()
    if controllers:
        (group / "init").mkdir()
        (group / "init" / "cgroup.procs").write_text("1")
        (group / "cgroup.subtree_control").write_text(
            " ".join(f"+{name}" for name in controllers)
        )


def configure_network(spec: dict[str, Any]) -> None:
    """Wait for eth0, set address and routes, and enable forwarding between pods and eth0."""
    while not Path("/sys/class/net/eth0").exists():
        time.sleep(0.005)
    lines = [
        "link set lo up",
        f"addr add {spec['address']}/24 dev eth0",
        "link set eth0 up",
    ]
    lines += [f"route add {target} {' '.join(hop)}" for target, *hop in spec["routes"]]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines).encode(), check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def supervise(services: list[dict[str, Any]], log: Path) -> None:
    """Start the services, restart each that exits, and reap orphans; does not return."""
    running: dict[int, dict[str, Any]] = {}
    for service in services:
        running[start(service, log)] = service
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        ended, status = os.wait()
        # Any other process is an orphan of a container; os.wait has reaped it.
        if ended in running:
            service = running.pop(ended)
            print(
                f"{service['name']} exited with wait status {status}; restarting it",
                flush=True,
            )
            time.sleep(PAUSE_BEFORE_RESTART)
            running[start(service, log)] = service


def start(service: dict[str, Any], log: Path) -> int:
    """Start a program in its own session and return its pid.

    It forks by itself, because `subprocess` would reap children that os.wait must see.
    """
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out = os.open(
        log / f"{service['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(stream, target)
    try:
        os.execve(service["argv"][0], service["argv"], service["env"])
    except OSError as problem:
        print(f"{service['argv'][0]}: {problem}", file=sys.stderr, flush=True)
    os._exit(127)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
