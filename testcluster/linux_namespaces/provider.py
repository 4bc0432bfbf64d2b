"""The provider without Docker: every machine is a set of Linux namespaces that runs the real programs."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from testcluster import binaries, dns, kwok, volume_provisioner
from testcluster.cluster_state import (
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
from testcluster.errors import TimedOut, UsageError
from testcluster.images import image_builders
from testcluster.interrupts import deferred_interrupt
from testcluster.kube import Kube
from testcluster.linux_namespaces import addons, cgroups, checks, image_store
from testcluster.linux_namespaces.certificates import ADMINS, Authority
from testcluster.linux_namespaces.control_plane import (
    REGISTRY_PORT,
    ControlPlane,
    older_programs,
    registry_config,
)
from testcluster.linux_namespaces.leftovers import leftover_processes
from testcluster.linux_namespaces.logs import keep_logs
from testcluster.linux_namespaces.machine import Machine
from testcluster.linux_namespaces.network import (
    CONTROL_PLANE_INDEX,
    MACHINES,
    Network,
    used_subnets,
)
from testcluster.linux_namespaces.node import Programs, own_images
from testcluster.linux_namespaces.programs import NEEDED
from testcluster.nodes import CONTROL_PLANE, Node
from testcluster.provider import ClusterSpec, ControlPlaneOptions, Pressure


class LinuxNamespaces:
    """A cluster by name; the verbs are documented in Provider."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = folder_of(name)
        self._mark = mark(self.folder)

    # ---- parts of a cluster

    @property
    def kubeconfig(self) -> Path:
        """Return the path of the administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def registry(self) -> str:
        """Return host:port of the registry."""
        return f"{self._network.address(CONTROL_PLANE_INDEX)}:{REGISTRY_PORT}"

    @property
    def kube(self) -> Kube:
        """Return a client of the API with administrator rights."""
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

    def _machine(self, name: str, index: int) -> Machine:
        return Machine(
            name,
            self.folder / "machines" / name,
            f"{self._prefix}{name}",
            self._network.veth_pair(index),
        )

    def machine(self, node: str) -> Machine:
        """Return the machine of a node. Raises UsageError for an unknown node."""
        state = self._state
        state.get_node(node)
        return self._machine(node, state.indexes[node])

    def _control_plane_machine(self) -> Machine:
        return self._machine(CONTROL_PLANE, CONTROL_PLANE_INDEX)

    def _running(self, name: str) -> Machine:
        """Return the running machine of a node or of the control plane. Raises UsageError when it is off."""
        machine = (
            self._control_plane_machine()
            if name == CONTROL_PLANE
            else self.machine(name)
        )
        if machine.pid is None:
            raise UsageError(
                f"{name} is powered off; `python -m testcluster --name {self.name} node revive {name}` powers it on"
            )
        return machine

    @cached_property
    def _control_plane(self) -> ControlPlane:
        folder = self.folder / "machines" / CONTROL_PLANE
        authority = Authority(self.folder / "pki")
        return ControlPlane(
            self.name,
            self._network.address(CONTROL_PLANE_INDEX),
            folder,
            self._binaries,
            authority,
        )

    def _programs(self, name: str) -> Programs:
        state = self._state
        machine = self.machine(name)
        return Programs(
            state.nodes[name],
            state.indexes[name],
            machine.veth.address,
            machine.folder,
            self._control_plane,
        )

    def _binds(self) -> list[tuple[Path, str]]:
        python = [Path(sys.prefix), Path(sys.base_prefix)]
        shared = [self.folder, self._binaries, *python, Path(__file__).parents[2]]
        return [
            *((path, str(path)) for path in shared),
            (self.folder / "volumes", volume_provisioner.NODE_FOLDER),
        ]

    # ---- up and down

    def exists(self) -> bool:
        """Check whether the folder or any cgroup of the cluster exists."""
        return self.folder.exists() or bool(cgroups.with_prefix(self._prefix))

    def nodes(self) -> list[Node]:
        """Return the nodes."""
        return list(self._state.nodes.values())

    def up(self, spec: ClusterSpec) -> None:
        """Create the cluster."""
        checks.check(self.folder)
        checks.check_inotify(len(spec.nodes))
        # Build the programs and look the images up first: both may fail, and nothing needs to be undone yet.
        _ = self._binaries
        binaries.build_missing(older_programs(spec.control_plane.kubernetes))
        _ = [
            image_builders.archive_path(image, cache() / "images")
            for image in spec.images
        ]
        state = create(self.folder, used_subnets())
        with locked_cluster(self.folder):
            try:
                self._create(state, spec)
            except TimedOut as problem:
                kept = keep_logs(self.folder, self.name)
                self._remove()
                raise TimedOut(
                    f"{problem}; the logs of all programs are in {kept}"
                ) from problem
            except BaseException:
                self._remove()
                raise

    def _create(self, state: State, spec: ClusterSpec) -> None:
        for node in spec.nodes:
            state.assign_index(node)
        state.kwok_nodes = spec.kwok_nodes
        (self.folder / "volumes").mkdir()
        self._network.create()
        state.save()
        self._start_control_plane(spec.control_plane, with_kwok=bool(spec.kwok_nodes))
        self._prepare_images(
            state, [*map(str, own_images(self._binaries)), *spec.images]
        )
        with deferred_interrupt(), ThreadPoolExecutor(8) as pool:
            list(pool.map(self._start_node, state.nodes))
        addons.install(
            self.kube,
            self._control_plane_machine(),
            self._control_plane.address,
            state,
        )

    def _prepare_images(self, state: State, images: Sequence[str]) -> None:
        state.image_store = image_store.store_name(
            [
                image_builders.archive_path(image, cache() / "images")
                for image in images
            ],
            self._binaries,
        )
        # Saved before the store exists, so that another cluster does not delete the store as unused.
        state.save()
        store = image_store.stores() / state.image_store
        image_store.provide(store, lambda: self._unpack_images(store, images))

    def _unpack_images(self, store: Path, images: Sequence[str]) -> None:
        checks.check_disk(self.folder)
        binaries.report_progress(
            f"unpacking {len(images)} images into the image store …"
        )
        # A temporary machine with containerd only. The last index is free: nodes have indexes up to MAX_NODES.
        unpacker = self._machine("unpacker", MACHINES - 1)
        programs = Programs(
            Node("unpacker", "ondemand", ""),
            MACHINES - 1,
            "",
            unpacker.folder,
            self._control_plane,
        )
        programs.configure()
        unpacker.start([programs.containerd()], self._binds())
        archives = [image_builders.export(image, unpacker.folder) for image in images]
        image_store.prepare_store(store, unpacker, self._binaries / "ctr", archives)
        shutil.rmtree(unpacker.folder)

    def _start_control_plane(
        self, options: ControlPlaneOptions, *, with_kwok: bool
    ) -> None:
        control = self._control_plane
        machine = self._control_plane_machine()
        (machine.folder / "etc").mkdir(parents=True)
        admin = control.kubeconfig("admin", "finetune-e2e", ADMINS)
        corefile = machine.folder / "etc" / "Corefile"
        corefile.write_text(
            dns.corefile(
                control.address, control.kubeconfig("coredns", "system:coredns")
            )
        )
        registry = machine.folder / "etc" / "registry.yaml"
        registry.write_text(registry_config(self.folder / "registry"))
        services = control.services(corefile, registry, options)
        if options.provisions_volumes:
            services.append(volume_provisioner.service(admin, self.folder / "volumes"))
        if with_kwok:
            services.append(kwok.service(self._binaries, admin))
        older = {binaries.folder(name) for name in older_programs(options.kubernetes)}
        machine.start(
            services, [*self._binds(), *((folder, str(folder)) for folder in older)]
        )
        shutil.copy(admin, self.kubeconfig)

    def _start_node(self, name: str) -> None:
        machine = self.machine(name)
        programs = self._programs(name)
        image_store.clone_store(
            image_store.stores() / self._state.image_store, machine.var
        )
        programs.configure()
        machine.start(programs.services(), self._binds())

    def down(self) -> None:
        """Delete the cluster, whatever state it is in; waits for a verb that is changing it."""
        take_down(self.folder, self._remove)

    def _remove(self) -> None:
        for pid in leftover_processes(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for group in cgroups.with_prefix(self._prefix):
            cgroups.thaw(group)
            cgroups.kill(group)
            cgroups.remove(group)
        Network(self._mark, 0).remove()
        remove(self.folder)

    # ---- nodes

    @exclusive
    def add(self, node: Node) -> None:
        """Create one more node."""
        checks.check_inotify(1)
        state = self._state
        state.assign_index(node)
        state.save()
        self._start_fresh(node.name)

    def _start_fresh(self, name: str) -> None:
        started = datetime.now(UTC).replace(microsecond=0)
        self._start_node(name)
        state = self._state
        image_store.load(
            self.machine(name),
            self._binaries / "ctr",
            [Path(archive) for archive in state.loaded],
        )
        self.kube.wait_ready([name], addons.READY_WITHIN, since=started)
        self.kube.patch_devices(name, state.nodes[name].devices)

    @exclusive
    def kill(self, node: str) -> None:
        """Power a node off."""
        self.machine(node).kill()

    @exclusive
    def revive(self, node: str) -> None:
        """Power a node on."""
        machine = self.machine(node)
        machine.kill()
        self._start_fresh(node)

    @exclusive
    def delete(self, node: str) -> None:
        """Kill a node and delete its disk and its Node object; `revive` then creates a fresh machine."""
        machine = self.machine(node)
        machine.kill()
        machine.wipe()
        self.kube.delete_node(node)

    @exclusive
    def pause(self, node: str) -> None:
        """Freeze every process of a node."""
        cgroups.freeze(self._running(node).cgroup)

    @exclusive
    def resume(self, node: str) -> None:
        """Thaw a paused node."""
        cgroups.thaw(self._running(node).cgroup)

    @exclusive
    def partition(self, node: str) -> None:
        """Disconnect a node from the network."""
        self._running(node).veth.set_down()

    @exclusive
    def heal(self, node: str) -> None:
        """Connect a partitioned node again."""
        self._running(node).veth.set_up()

    @exclusive
    def apply_pressure(self, node: str, pressure: Pressure) -> None:
        """Configure thresholds that are always exceeded, and restart the kubelet."""
        self._reconfigure(node, pressure)

    @exclusive
    def clear_pressure(self, node: str) -> None:
        """Restore the default thresholds, and restart the kubelet."""
        self._reconfigure(node, None)

    def _reconfigure(self, node: str, pressure: Pressure | None) -> None:
        programs = self._programs(node)
        machine = self._running(node)
        programs.configure(pressure)
        machine.restart("kubelet")

    @exclusive
    def load(self, images: Sequence[str]) -> None:
        """Load images onto every running node. Raises TimedOut that names the nodes on which it failed."""
        folder = self.folder / "images"
        archives = [
            image_store.protect(image_builders.export(image, folder), folder)
            for image in images
        ]
        state = self._state
        running = [machine for machine in map(self.machine, state.nodes) if machine.pid]
        problems = []
        for machine in running:
            try:
                image_store.load(machine, self._binaries / "ctr", archives)
            except TimedOut as problem:
                problems.append(str(problem))
        # A node created or revived later gets these images too, unless no running node could load them.
        if len(problems) < len(running) or not running:
            state.loaded += [
                str(archive) for archive in archives if str(archive) not in state.loaded
            ]
            state.save()
        if problems:
            raise TimedOut("; ".join(problems))
