"""A cluster without Docker: every machine is a set of namespaces, with real programs in it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from testcluster import binaries, dns
from testcluster import kwok as fake
from testcluster import volume_provisioner as storage
from testcluster.errors import TimedOut, UsageError
from testcluster.images import engines, packing
from testcluster.kube import Kube
from testcluster.linux_namespaces import cgroups, checks, image_store
from testcluster.linux_namespaces.certificates import ADMINS, Authority
from testcluster.linux_namespaces.control_plane import REGISTRY_PORT, ControlPlane
from testcluster.linux_namespaces.machine import Machine, wait_until
from testcluster.linux_namespaces.network import CONTROL_PLANE_INDEX, DNS_SERVICE, MACHINES, Network, used_subnets
from testcluster.linux_namespaces.node import PAUSE, Programs
from testcluster.nodes import CONTROL_PLANE, Node
from testcluster.provider import ClusterSpec, Pressure
from testcluster.service import Service
from testcluster.state import (
    State,
    cache,
    create,
    exclusive,
    folder_of,
    locked_cluster,
    mark,
    remove,
    take_down,
)

NEEDED = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"),
    *("etcd", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "registry", "coredns", "kwok", "pause"),
)
READY_WITHIN = 60
"""Seconds; a few are usual."""


class LinuxNamespaces:
    """A cluster by name; see Provider for what the verbs promise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = folder_of(name)
        self._mark = mark(self.folder)

    # ---- what it is made of

    @property
    def kubeconfig(self) -> Path:
        """Give the administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def registry(self) -> str:
        """Give the registry's host:port."""
        return f"{self._network.address(CONTROL_PLANE_INDEX)}:{REGISTRY_PORT}"

    @property
    def kube(self) -> Kube:
        """Give the API, as administrator."""
        return Kube(self._binaries / "kubectl", self.kubeconfig)

    @cached_property
    def _binaries(self) -> Path:
        return binaries.build_missing(NEEDED)

    @property
    def _state(self) -> State:
        return State.read(self.folder)

    @property
    def _network(self) -> Network:
        return Network(self._mark, self._state.subnet)

    @property
    def _prefix(self) -> str:
        return f"finetune.{self.name}.{self._mark}."

    def _machine(self, name: str, seat: int) -> Machine:
        return Machine(name, self.folder / "machines" / name, f"{self._prefix}{name}", self._network.cable(seat))

    def machine(self, node: str) -> Machine:
        """Give the machine of a node. Raises Refused for a node that there is not."""
        state = self._state
        state.known(node)
        return self._machine(node, state.indexes[node])

    def _control_plane(self) -> Machine:
        return self._machine(CONTROL_PLANE, CONTROL_PLANE_INDEX)

    def _running(self, name: str) -> Machine:
        """Give a machine that is on, the control plane's too. Raises Refused for one that is off."""
        machine = self._control_plane() if name == CONTROL_PLANE else self.machine(name)
        if machine.pid is None:
            raise UsageError(
                f"{name} is off; `python -m testcluster --name {self.name} node revive {name}` turns it on"
            )
        return machine

    @cached_property
    def _control(self) -> ControlPlane:
        folder = self.folder / "machines" / CONTROL_PLANE
        authority = Authority(self.folder / "pki")
        return ControlPlane(self.name, self._network.address(CONTROL_PLANE_INDEX), folder, self._binaries, authority)

    def _programs(self, name: str) -> Programs:
        state = self._state
        machine = self.machine(name)
        return Programs(state.nodes[name], state.indexes[name], machine.veth.address, machine.folder, self._control)

    def _binds(self) -> list[tuple[Path, str]]:
        shared = [self.folder, self._binaries, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]]
        return [*((path, str(path)) for path in shared), (self.folder / "volumes", storage.ON_NODES)]

    # ---- up and down

    def exists(self) -> bool:
        """Tell whether anything of it is there."""
        return self.folder.exists() or bool(cgroups.like(self._prefix))

    def nodes(self) -> list[Node]:
        """Give its nodes."""
        return list(self._state.nodes.values())

    def up(self, wish: ClusterSpec) -> None:
        """Make it."""
        checks.check(self.folder)
        checks.check_watches(len(wish.nodes))
        _ = self._binaries
        _ = [engines.place(image, cache() / "images") for image in wish.images]
        state = create(self.folder, used_subnets())
        with locked_cluster(self.folder):
            try:
                self._make(state, wish)
            except TimedOut as problem:
                kept = self._keep_logs()
                self._remove()
                raise TimedOut(f"{problem}; the logs of all programs are kept in {kept}") from problem
            except BaseException:
                self._remove()
                raise

    def _keep_logs(self) -> Path:
        kept = cache() / "logs" / self.name
        shutil.rmtree(kept, ignore_errors=True)
        # A full disk may be what went wrong: then fewer are kept, and the cluster goes all the same.
        with suppress(OSError):
            for log in self.folder.glob("machines/*/log"):
                shutil.copytree(log, kept / log.parent.name)
        return kept

    def _make(self, state: State, wish: ClusterSpec) -> None:
        for node in wish.nodes:
            state.assign_index(node)
        state.fake_nodes = wish.fake_nodes
        (self.folder / "volumes").mkdir()
        self._network.make()
        state.save()
        self._start_control_plane(fakes=bool(wish.fake_nodes))
        self._prepare_images(state, [*map(str, self._own_images()), *wish.images])
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._start_node, state.nodes))
        self._install_addons(state)

    def _own_images(self) -> list[Path]:
        folder = cache() / "images"
        pause = packing.archive(folder, PAUSE, {"pause": self._binaries / "pause"}, ["/pause"])
        box = packing.busybox()
        tools = {f"bin/{name}": box for name in ("busybox", "sh")}
        return [pause, packing.archive(folder, packing.TOOLBOX, tools, ["/bin/sh"])]

    def _prepare_images(self, state: State, wanted: Sequence[str]) -> None:
        state.image_store = image_store.store_name(
            [engines.place(image, cache() / "images") for image in wanted], self._binaries
        )
        # Said before it is there, so that nobody clears it out.
        state.save()
        pantry = cache() / "pantry" / state.image_store
        image_store.provide(pantry, lambda: self._unpack_images(pantry, wanted))

    def _unpack_images(self, pantry: Path, wanted: Sequence[str]) -> None:
        checks.check_disk(self.folder)
        binaries.report_progress(f"unpacking {len(wanted)} images for all nodes, once …")
        kitchen = self._machine("kitchen", MACHINES - 1)
        programs = Programs(Node("kitchen", "ondemand", ""), MACHINES - 1, "", kitchen.folder, self._control)
        programs.configure()
        kitchen.start([programs.containerd()], self._binds())
        archives = [engines.export(image, kitchen.folder) for image in wanted]
        image_store.prepare_store(pantry, kitchen, self._binaries / "ctr", archives)
        shutil.rmtree(kitchen.folder)

    def _start_control_plane(self, *, fakes: bool) -> None:
        control = self._control
        machine = self._control_plane()
        (machine.folder / "etc").mkdir(parents=True)
        admin = control.kubeconfig("admin", "finetune-e2e", ADMINS)
        corefile = machine.folder / "etc" / "Corefile"
        corefile.write_text(dns.corefile(control.address, control.kubeconfig("coredns", "system:coredns")))
        registry = machine.folder / "etc" / "registry.yaml"
        registry.write_text(_registry(self.folder / "registry"))
        serve = ["-m", "testcluster.volume_provisioner", f"--kubeconfig={admin}", f"--folder={self.folder / 'volumes'}"]
        provisioner = Service("storage", [sys.executable, *serve], {"PYTHONPATH": str(Path(__file__).parents[2])})
        services = [*control.services(corefile, registry), provisioner]
        if fakes:
            services.append(fake.service(self._binaries, admin))
        machine.start(services, self._binds())
        shutil.copy(admin, self.kubeconfig)

    def _start_node(self, name: str) -> None:
        machine = self.machine(name)
        programs = self._programs(name)
        image_store.clone_store(cache() / "pantry" / self._state.image_store, machine.var)
        programs.configure()
        machine.start(programs.services(), self._binds())

    def _install_addons(self, state: State) -> None:
        kube = self.kube
        kube.wait_api(READY_WITHIN)
        address = self._control.address
        kube.apply([*dns.manifests(address, DNS_SERVICE), *storage.classes()])
        self._control_plane().restart("coredns")  # it was refused until now, and asks ever more seldom
        fake.make(kube, state.fake_nodes)
        kube.wait_ready(state.nodes, READY_WITHIN)
        wait_until(iter(lambda: dns.answers(address), None), READY_WITHIN, "CoreDNS knows no names")
        for node in state.nodes.values():
            kube.patch_devices(node.name, node.devices)

    def down(self) -> None:
        """Take everything away, whatever state it is in; what else is done to it comes to its end first."""
        take_down(self.folder, self._remove)

    def _remove(self) -> None:
        for pid in _leftover_processes(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for group in cgroups.like(self._prefix):
            cgroups.thaw(group)
            cgroups.kill(group)
            cgroups.remove(group)
        Network(self._mark, 0).remove()
        remove(self.folder)

    # ---- nodes

    @exclusive
    def add(self, node: Node) -> None:
        """Make one more."""
        checks.check_watches(1)
        state = self._state
        state.assign_index(node)
        state.save()
        self._start_fresh(node.name)

    def _start_fresh(self, name: str) -> None:
        begun = datetime.now(UTC).replace(microsecond=0)
        self._start_node(name)
        state = self._state
        image_store.load(self.machine(name), self._binaries / "ctr", [Path(archive) for archive in state.loaded])
        self.kube.wait_ready([name], READY_WITHIN, since=begun)
        self.kube.patch_devices(name, state.nodes[name].devices)

    @exclusive
    def kill(self, node: str) -> None:
        """Turn its power off."""
        self.machine(node).kill()

    @exclusive
    def revive(self, node: str) -> None:
        """Turn it on again."""
        machine = self.machine(node)
        machine.kill()
        self._start_fresh(node)

    @exclusive
    def delete(self, node: str) -> None:
        """Kill it, with its disk, and take its Node object away; revive would make it anew."""
        machine = self.machine(node)
        machine.kill()
        machine.wipe()
        self.kube.delete_node(node)

    @exclusive
    def pause(self, node: str) -> None:
        """Stop everything on it."""
        cgroups.freeze(self._running(node).cgroup)

    @exclusive
    def resume(self, node: str) -> None:
        """Let it go on."""
        cgroups.thaw(self._running(node).cgroup)

    @exclusive
    def partition(self, node: str) -> None:
        """Take its network away."""
        self._running(node).veth.set_down()

    @exclusive
    def heal(self, node: str) -> None:
        """Give it back."""
        self._running(node).veth.set_up()

    @exclusive
    def apply_pressure(self, node: str, pressure: Pressure) -> None:
        """Make its kubelet see too little."""
        self._reconfigure(node, pressure)

    @exclusive
    def clear_pressure(self, node: str) -> None:
        """End all pressure."""
        self._reconfigure(node, None)

    def _reconfigure(self, node: str, pressure: Pressure | None) -> None:
        programs = self._programs(node)
        machine = self._running(node)
        programs.configure(pressure)
        machine.restart("kubelet")

    @exclusive
    def load(self, images_: Sequence[str]) -> None:
        """Bring images to all nodes that live; nodes that cannot take them are named, the others have them."""
        own = self.folder / "images"
        archives = [image_store.protect(engines.export(image, own), own) for image in images_]
        state = self._state
        living = [machine for machine in map(self.machine, state.nodes) if machine.pid]
        problems = []
        for machine in living:
            try:
                image_store.load(machine, self._binaries / "ctr", archives)
            except TimedOut as problem:
                problems.append(str(problem))
        if len(problems) < len(living) or not living:
            state.loaded += [str(archive) for archive in archives if str(archive) not in state.loaded]
            state.save()
        if problems:
            raise TimedOut("; ".join(problems))


def _registry(folder: Path) -> str:
    return f"""version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}}}, delete: {{enabled: true}}}}
http: {{addr: ":{REGISTRY_PORT}"}}
"""


def _leftover_processes(folder: Path) -> Iterable[int]:
    """Find what belongs to it and is in no control group.

    That is the first processes of machines before they enter theirs, and what an `up` that was killed had asked of
    kubectl or of an image engine.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
            launches = "-ISE" in words and any(word.startswith(f"{folder}/machines/") for word in words)
            asks = f"{folder}/kubeconfig" in words
            exports = any(word.startswith((f"docker-archive:{folder}/", f"--output={folder}/")) for word in words)
            if launches or asks or exports:
                yield int(entry.name)
