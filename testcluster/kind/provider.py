"""A cluster whose nodes are Docker containers, made by kind; nothing is pulled but kind's own node image."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from testcluster import binaries
from testcluster import kwok as fake
from testcluster import volume_provisioner as storage
from testcluster.commands import run_command
from testcluster.errors import TimedOut, UsageError
from testcluster.images import engines, packing
from testcluster.kind import docker
from testcluster.kind.config import REGISTRIES, config
from testcluster.kube import Kube
from testcluster.nodes import CONTROL_PLANE, Node
from testcluster.pressure import EXCEEDED_THRESHOLDS
from testcluster.provider import ClusterSpec, Pressure
from testcluster.service import Service
from testcluster.state import State, cache, create, exclusive, folder_of, locked_cluster, remove, take_down

NEEDED = ("kind", "kubectl", "kwok", "registry", "pause")
FIRST_PORT, PORTS = 5001, 50
READY_WITHIN = 180
SLOW = 600
"""Seconds that kind may take to make a cluster or to load an image."""
_KUBELET = "/var/lib/kubelet/config.yaml"
_ORIGINAL = "/var/lib/kubelet/config.original.yaml"


class Kind:
    """A cluster by name; see Provider for what the verbs promise."""

    def __init__(self, name: str, *, node_image: str | None = None) -> None:
        self.name = name
        self.folder = folder_of(name)
        self._image = node_image

    @property
    def kubeconfig(self) -> Path:
        """Give the administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def registry(self) -> str:
        """Give the registry's host:port: this host, on the network of the nodes."""
        return (self.folder / "registry.address").read_text()

    @property
    def kube(self) -> Kube:
        """Give the API, as administrator."""
        return Kube(self._binaries / "kubectl", self.kubeconfig)

    @cached_property
    def _binaries(self) -> Path:
        return binaries.build_missing(NEEDED)

    @property
    def _kind(self) -> str:
        return shutil.which("kind") or str(self._binaries / "kind")

    @property
    def _state(self) -> State:
        return State.read(self.folder)

    def exists(self) -> bool:
        """Tell whether anything of it is there."""
        made_here = self.folder.exists() and (self.folder / "kind.json").exists()
        return made_here or bool(docker.containers(self.name))

    def nodes(self) -> list[Node]:
        """Give its nodes."""
        return list(self._state.nodes.values())

    def up(self, wish: ClusterSpec) -> None:
        """Make it."""
        if not engines.ENGINES["docker"].there():
            raise UsageError("no Docker engine answers; start it, or as root on Linux use --provider bare")
        _ = self._binaries
        state = create(self.folder, set())
        with locked_cluster(self.folder):
            try:
                self._make(state, wish)
            except BaseException:
                self._remove()
                raise

    def _make(self, state: State, wish: ClusterSpec) -> None:
        for node in wish.nodes:
            state.assign_index(node)
        state.fake_nodes = wish.fake_nodes
        state.save()
        (self.folder / "volumes").mkdir()
        written = self.folder / "kind.json"
        written.write_text(config(self.nodes(), self.folder / "volumes", self._image))
        run_command(
            self._kind, "create", "cluster", *self._own, f"--config={written}", f"--kubeconfig={self.kubeconfig}"
        )
        self.kube.wait_ready(map(self._container, state.nodes), READY_WITHIN)
        self._serve_beside(state)
        self._install_addons(state)
        self._bring([*map(str, self._own_images()), *wish.images])

    @property
    def _own(self) -> list[str]:
        return [f"--name={self.name}"]

    def _own_images(self) -> list[Path]:
        tools = {f"bin/{name}": packing.busybox() for name in ("busybox", "sh")}
        return [packing.archive(cache() / "images", packing.TOOLBOX, tools, ["/bin/sh"])]

    def _install_addons(self, state: State) -> None:
        kube = self.kube
        # kind's own class is made for one node; ours is the default instead.
        kube.run("delete", "storageclass", "standard", "--ignore-not-found")
        kube.apply(storage.classes())
        fake.make(kube, state.fake_nodes)
        for node in state.nodes.values():
            kube.patch_devices(self._container(node.name), node.devices)

    # ---- programs of ours beside the cluster

    def _serve_beside(self, state: State) -> None:
        """Start registry, volumes and fake nodes as processes of this host; their numbers are kept for `down`."""
        address, port = docker.gateway(), self._free_port()
        (self.folder / "registry.address").write_text(f"{address}:{port}")
        settings = self.folder / "registry.json"
        settings.write_text(
            json.dumps(
                {
                    "version": 0.1,
                    "storage": {"filesystem": {"rootdirectory": str(self.folder / "registry")}},
                    "http": {"addr": f"{address}:{port}"},
                }
            )
        )
        volumes = [
            "-m",
            "testcluster.volume_provisioner",
            f"--kubeconfig={self.kubeconfig}",
            f"--folder={self.folder / 'volumes'}",
        ]
        services = [
            Service("registry", [str(self._binaries / "registry"), "serve", str(settings)]),
            Service("storage", [sys.executable, *volumes], {"PYTHONPATH": str(Path(__file__).parents[2])}),
            *([fake.service(self._binaries, self.kubeconfig)] if state.fake_nodes else []),
        ]
        (self.folder / "pids").write_text("\n".join(f"{self._start(service)}" for service in services))
        for node in docker.containers(self.name):
            for name in (f"localhost:{port}", f"{address}:{port}"):
                hosts = f'server = "http://{address}:{port}"\n'
                write = f"mkdir -p {REGISTRIES}/{name} && cat > {REGISTRIES}/{name}/hosts.toml"
                run_command("docker", "exec", "--interactive", node, "sh", "-c", write, given=hosts)

    def _start(self, service: Service) -> int:
        with (self.folder / f"{service.name}.log").open("ab") as out:
            started = subprocess.Popen(
                service.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | service.env,
                start_new_session=True,
            )
        return started.pid

    @staticmethod
    def _free_port() -> int:
        for port in range(FIRST_PORT, FIRST_PORT + PORTS):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with suppress(OSError):
                    probe.bind(("0.0.0.0", port))
                    return port
        raise UsageError(
            f"every port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is taken; free one for the registry"
        )

    def down(self) -> None:
        """Take everything away, also after a crash; what else is done to it comes to its end first."""
        take_down(self.folder, self._remove)

    def _remove(self) -> None:
        with suppress(OSError, ValueError):
            for pid in map(int, (self.folder / "pids").read_text().split()):
                self._stop(pid)
        if docker.containers(self.name):
            run_command(self._kind, "delete", "cluster", *self._own, f"--kubeconfig={self.kubeconfig}")
        remove(self.folder)

    def _stop(self, pid: int) -> None:
        # A number may belong to somebody else by now; ours carry the folder in their arguments.
        with suppress(OSError):
            if os.fsencode(self.folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    # ---- nodes

    def add(self, node: Node) -> None:
        """Refuse: kind makes all nodes at once."""
        raise UsageError(f"kind cannot add {node.name} to a cluster that runs; make it anew with more --nodes")

    def _container(self, node: str) -> str:
        """Name a node as kind does, which counts: NAME-worker, NAME-worker2, …; so is the Node object called."""
        if node == CONTROL_PLANE:
            return f"{self.name}-{CONTROL_PLANE}"
        state = self._state
        state.known(node)
        seat = state.indexes[node]
        return f"{self.name}-worker{seat if seat > 1 else ''}"

    @exclusive
    def kill(self, node: str) -> None:
        """Turn its power off."""
        self._turn_off(node)

    def _turn_off(self, node: str) -> None:
        # `docker stop` would be an orderly shutdown, in which pods are told.
        run_command("docker", "kill", self._container(node))

    @exclusive
    def revive(self, node: str) -> None:
        """Start the container again; its kubelet registers anew where the Node object is gone."""
        begun = datetime.now(UTC).replace(microsecond=0)
        run_command("docker", "start", self._container(node))
        self.kube.wait_ready([self._container(node)], READY_WITHIN, since=begun)
        self.kube.patch_devices(self._container(node), self._state.nodes[node].devices)

    @exclusive
    def delete(self, node: str) -> None:
        """Kill it and take its Node object away; the container stays, stopped, so that it can be revived."""
        with suppress(TimedOut):
            self._turn_off(node)
        self.kube.delete_node(self._container(node))

    @exclusive
    def pause(self, node: str) -> None:
        """Stop everything on it."""
        run_command("docker", "pause", self._container(node))

    @exclusive
    def resume(self, node: str) -> None:
        """Let it go on."""
        run_command("docker", "unpause", self._container(node))

    @exclusive
    def partition(self, node: str) -> None:
        """Take its network away."""
        run_command("docker", "network", "disconnect", docker.NETWORK, self._container(node))

    @exclusive
    def heal(self, node: str) -> None:
        """Give it back."""
        run_command("docker", "network", "connect", docker.NETWORK, self._container(node))

    @exclusive
    def apply_pressure(self, node: str, pressure: Pressure) -> None:
        """Add thresholds that are never met to its kubelet's configuration."""
        added = json.dumps({"evictionHard": EXCEEDED_THRESHOLDS[pressure], "evictionPressureTransitionPeriod": "5s"})
        # A JSON object per line is not YAML that merges: the old keys are dropped, then ours are appended.
        script = (
            f"cp -n {_KUBELET} {_ORIGINAL}; "
            f"sed -e '/^evictionHard:/,/^[^ ]/{{/^evictionHard:/d;/^ /d}}' -e '/^evictionPressure/d' "
            f"{_ORIGINAL} > {_KUBELET}; cat >> {_KUBELET}; systemctl restart kubelet"
        )
        lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in json.loads(added).items())
        run_command("docker", "exec", "--interactive", self._container(node), "sh", "-c", script, given=f"{lines}\n")

    @exclusive
    def clear_pressure(self, node: str) -> None:
        """Give the kubelet its own configuration back."""
        script = f"if [ -f {_ORIGINAL} ]; then mv {_ORIGINAL} {_KUBELET}; systemctl restart kubelet; fi"
        run_command("docker", "exec", self._container(node), "sh", "-c", script)

    @exclusive
    def load(self, images: Sequence[str]) -> None:
        """Bring images to all nodes."""
        self._bring(images)

    def _bring(self, images: Sequence[str]) -> None:
        for image in images:
            what = ("image-archive", image) if image.endswith(".tar") else ("docker-image", image)
            run_command(self._kind, "load", *what, *self._own, timeout=SLOW)
