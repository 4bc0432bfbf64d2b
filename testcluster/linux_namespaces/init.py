"""The first process of a machine: `init.py FOLDER` makes its namespaces and root, and keeps its services running.

Standard library only, and no import of ours: it must start in milliseconds. What it does is written in
FOLDER/machine.json by machine.py. When this process dies the kernel kills everything in its process namespace,
and with the last process go its mounts and its network.
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

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 1, 32, 4096, 16384, 1 << 18, 1 << 20
MNT_DETACH = 2
OWN = ("proc", "sys", "dev", "run", "tmp", "var", "mnt", "media", "lost+found", "boot")
WANTED_BY_KUBELET = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Settings of the whole host that a kubelet sets unless it finds them so."""
PAUSE_BEFORE_RESTART = 0.3
"""Seconds between the end of a service and its next start."""

libc = ctypes.CDLL(None, use_errno=True)


def check(outcome: int, what: str) -> None:
    if outcome != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    def coded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    done = libc.mount(source.encode(), os.fsencode(target), coded(kind), ctypes.c_ulong(flags), coded(data))
    check(done, f"mount {source} on {target}")


def main(folder: Path) -> None:
    spec = json.loads((folder / "machine.json").read_text())
    hierarchies = join_cgroups(spec["cgroup"])
    spaces = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    check(libc.unshare(ctypes.c_int(spaces)), "unshare")
    child = os.fork()
    if child:
        # Written by the parent, because only outside the namespace is the number of any use.
        (folder / "pid.new").write_text(str(child))
        (folder / "pid.new").replace(folder / "pid")
        os._exit(0)
    boot(folder, spec, hierarchies)


def join_cgroups(name: str) -> list[dict[str, str]]:
    """Enter a group of our own in every hierarchy, so that all that ever runs here can be found, frozen and counted."""
    hierarchies = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        if kind not in {"cgroup", "cgroup2"}:
            continue
        where = Path(left.split()[4])
        group = where / name
        group.mkdir(parents=True, exist_ok=True)
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            if kind == "cgroup" and (where / inherited).exists():
                (group / inherited).write_text((where / inherited).read_text())
        (group / "cgroup.procs").write_text(str(os.getpid()))
        hierarchies.append({"at": str(where), "kind": kind, "options": cgroup_options(options)})
    return hierarchies


def cgroup_options(options: str) -> str:
    words = [word for word in options.split(",") if word not in {"rw", "ro", "relatime", "nsdelegate"}]
    named = any(word.startswith("name=") for word in words)
    return ",".join(["none", *words] if named else words)


def boot(folder: Path, spec: dict[str, Any], hierarchies: list[dict[str, str]]) -> None:
    os.setsid()
    name = spec["name"].encode()
    check(libc.sethostname(name, len(name)), "sethostname")
    make_root(folder / "root", spec["binds"])
    mount_kernel_views(hierarchies)
    configure_network(spec)
    supervise(spec["services"], folder / "log")


def make_root(root: Path, binds: list[list[str]]) -> None:
    """Give the machine the programs of the host, read-only, and a /var, /run and /tmp of its own."""
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
    mount("machine", root, "tmpfs", 0, "mode=755,size=64m")
    for entry in sorted(os.scandir("/"), key=lambda found: found.name):
        if entry.name in OWN:
            continue
        inside = root / entry.name
        if entry.is_symlink():
            inside.symlink_to(Path(entry.path).readlink())
        elif entry.is_dir():
            inside.mkdir()
            mount(entry.path, inside, None, MS_BIND | MS_REC)
            mount("none", inside, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    for own in OWN:
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
    (root / "mnt" / "old").mkdir()
    subprocess.run(["pivot_root", str(root), str(root / "mnt/old")], check=True)
    os.chdir("/")
    check(libc.umount2(b"/mnt/old", MNT_DETACH), "umount /mnt/old")
    Path("/mnt/old").rmdir()
    # The kubelet hands volumes on to containers and wants to see later mounts there.
    mount("none", Path("/"), None, MS_REC | MS_SHARED)


def mount_kernel_views(hierarchies: list[dict[str, str]]) -> None:
    """Show the machine its own cgroups, and no way to change the host's kernel settings but for its own network."""
    mount("cgroup", Path("/sys/fs/cgroup"), "tmpfs", 0, "mode=755")
    for hierarchy in hierarchies:
        at = Path(hierarchy["at"])
        at.mkdir(parents=True, exist_ok=True)
        mount("cgroup", at, hierarchy["kind"], 0, hierarchy["options"] if hierarchy["kind"] == "cgroup" else None)
        if hierarchy["kind"] == "cgroup2":
            delegate_cgroups(at)
        for alias in hierarchy["options"].split(",") if "," in hierarchy["options"] else []:
            if not (at.parent / alias).exists() and alias != "none" and "=" not in alias:
                (at.parent / alias).symlink_to(at.name)
    show_settings()
    mount("/proc/sys", Path("/proc/sys"), None, MS_BIND | MS_REC)
    mount("/proc/sys/net", Path("/proc/sys/net"), None, MS_BIND)
    mount("none", Path("/proc/sys"), None, MS_BIND | MS_REMOUNT | MS_RDONLY)


def show_settings() -> None:
    """Cover the settings that the kubelet would change for everybody with files that say what it wants to read."""
    for name, value in WANTED_BY_KUBELET.items():
        shown = Path("/run/settings") / name
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(f"{value}\n")
        if (Path("/proc/sys") / name).exists():
            mount(str(shown), Path("/proc/sys") / name, None, MS_BIND)


def delegate_cgroups(group: Path) -> None:
    """In version 2 a group that hands controllers down may hold no process: ours moves into a leaf."""
    controllers = (group / "cgroup.controllers").read_text().split()
    if controllers:
        (group / "init").mkdir()
        (group / "init" / "cgroup.procs").write_text("1")
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def configure_network(spec: dict[str, Any]) -> None:
    """Wait for the cable, then set addresses and routes; forward packets between pods and the cable."""
    while not Path("/sys/class/net/eth0").exists():
        time.sleep(0.005)
    lines = ["link set lo up", f"addr add {spec['address']}/24 dev eth0", "link set eth0 up"]
    lines += [f"route add {target} {' '.join(by)}" for target, *by in spec["routes"]]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines).encode(), check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def supervise(services: list[dict[str, Any]], log: Path) -> None:
    running: dict[int, dict[str, Any]] = {}
    for service in services:
        running[start(service, log)] = service
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        ended, status = os.wait()
        # Whoever else ends here is an orphan of a container, and only had to be reaped.
        if ended in running:
            service = running.pop(ended)
            print(f"{service['name']} ended with status {status}; starting it again", flush=True)
            time.sleep(PAUSE_BEFORE_RESTART)
            running[start(service, log)] = service


def start(service: dict[str, Any], log: Path) -> int:
    """Start a program in a session of its own. Not by subprocess, which would reap behind the back of os.wait."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out = os.open(log / f"{service['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(stream, target)
    try:
        os.execve(service["argv"][0], service["argv"], service["env"])
    except OSError as problem:
        print(f"{service['argv'][0]}: {problem}", file=sys.stderr, flush=True)
    os._exit(127)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
