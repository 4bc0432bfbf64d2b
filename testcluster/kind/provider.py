"""The provider whose nodes are Docker containers, created by kind. It pulls no image except kind's own node image."""

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

from testcluster import binaries, kwok, volume_provisioner
from testcluster.cluster_state import (
    State,
    cache,
    create,
    exclusive,
    folder_of,
    locked_cluster,
    remove,
    take_down,
)
from testcluster.commands import run_command
from testcluster.errors import TimedOut, UsageError
from testcluster.images import image_builders, image_layers
from testcluster.kind import docker, node_image
from testcluster.kind.config import REGISTRIES, config
from testcluster.kube import Kube
from testcluster.nodes import CONTROL_PLANE, Node
from testcluster.provider import (
    EXCEEDED_THRESHOLDS,
    USUAL_CONTROL_PLANE,
    ClusterSpec,
    Pressure,
)
from testcluster.service import Service

NEEDED = ("kind", "kubectl", "kwok", "registry", "pause")
FIRST_PORT = 5001
PORTS = 50
"""Ports of the host that are tried for the registry."""
READY_WITHIN = 180
"""Seconds until nodes must be Ready."""
CREATE_TIMEOUT = 600
LOAD_TIMEOUT = 600
DELETE_TIMEOUT = 120
"""Seconds that kind may take to create a cluster, to load an image, and to delete a cluster."""
_KUBELET = "/var/lib/kubelet/config.yaml"
_ORIGINAL = "/var/lib/kubelet/config.original.yaml"


class Kind:
    """A cluster by name; the verbs are documented in Provider."""

    def __init__(self, name: str, *, node_image: str | None = None) -> None:
        self.name = name
        self.folder = folder_of(name)
        self._image = node_image

    @property
    def kubeconfig(self) -> Path:
        """Return the path of the administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def registry(self) -> str:
        """Return host:port of the registry: the host's address on the network of the nodes."""
        return (self.folder / "registry.address").read_text()

    @property
    def kube(self) -> Kube:
        """Return a client of the API with administrator rights."""
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
        """Check whether the configuration or any container of the cluster exists."""
        has_config = self.folder.exists() and (self.folder / "kind.json").exists()
        return has_config or bool(docker.containers(self.name))

    def nodes(self) -> list[Node]:
        """Return the nodes."""
        return list(self._state.nodes.values())

    def up(self, spec: ClusterSpec) -> None:
        """Create the cluster."""
        if not image_builders.ENGINES["docker"].is_available():
            raise UsageError(
                "no Docker engine answers; start it, or as root on Linux use --provider linux-namespaces"
            )
        if spec.control_plane != USUAL_CONTROL_PLANE:
            raise UsageError(
                "kind's control plane has no options here; as root on Linux use linux-namespaces"
            )
        _ = self._binaries
        if self._image == node_image.LOCAL:
            self._image = node_image.load(
                node_image.build(binaries.report_progress), binaries.report_progress
            )
        state = create(self.folder, set())
        with locked_cluster(self.folder):
            try:
                self._create(state, spec)
            except BaseException:
                self._remove()
                raise

    def _create(self, state: State, spec: ClusterSpec) -> None:
        for node in spec.nodes:
            state.assign_index(node)
        state.kwok_nodes = spec.kwok_nodes
        state.save()
        (self.folder / "volumes").mkdir()
        config_file = self.folder / "kind.json"
        config_file.write_text(
            config(self.nodes(), self.folder / "volumes", self._image)
        )
        run_command(
            self._kind,
            "create",
            "cluster",
            *self._name_option,
            f"--config={config_file}",
            f"--kubeconfig={self.kubeconfig}",
            timeout=CREATE_TIMEOUT,
        )
        self.kube.wait_ready(map(self._container, state.nodes), READY_WITHIN)
        self._start_services(state)
        self._install_addons(state)
        self._load([*map(str, self._own_images()), *spec.images])

    @property
    def _name_option(self) -> list[str]:
        return [f"--name={self.name}"]

    def _own_images(self) -> list[Path]:
        tools = {f"bin/{name}": image_layers.busybox() for name in ("busybox", "sh")}
        return [
            image_layers.archive(
                cache() / "images", image_layers.TOOLBOX, tools, ["/bin/sh"]
            )
        ]

    def _install_addons(self, state: State) -> None:
        kube = self.kube
        # The volumes of kind's default class stay on one node, so `shared` becomes the default instead.
        kube.run("delete", "storageclass", "standard", "--ignore-not-found")
        kube.apply(volume_provisioner.storage_classes())
        kwok.create_nodes(kube, state.kwok_nodes)
        for node in state.nodes.values():
            kube.patch_devices(self._container(node.name), node.devices)

    # ---- services on the host

    def _start_services(self, state: State) -> None:
        """Start registry, volume provisioner and kwok as processes of the host; `down` reads their pids from a file."""
        address = docker.gateway()
        port = self._free_port()
        (self.folder / "registry.address").write_text(f"{address}:{port}")
        registry_config = self.folder / "registry.json"
        registry_config.write_text(
            json.dumps(
                {
                    "version": 0.1,
                    "storage": {
                        "filesystem": {"rootdirectory": str(self.folder / "registry")}
                    },
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
            Service(
                "registry",
                [str(self._binaries / "registry"), "serve", str(registry_config)],
            ),
            Service(
                "storage",
                [sys.executable, *volumes],
                {"PYTHONPATH": str(Path(__file__).parents[2])},
            ),
            *(
                [kwok.service(self._binaries, self.kubeconfig)]
                if state.kwok_nodes
                else []
            ),
        ]
        (self.folder / "pids").write_text(
            "\n".join(f"{self._start(service)}" for service in services)
        )
        for node in docker.containers(self.name):
            for name in (f"localhost:{port}", f"{address}:{port}"):
                hosts = f'server = "http://{address}:{port}"\n'
                script = f"mkdir -p {REGISTRIES}/{name} && cat > {REGISTRIES}/{name}/hosts.toml"
                run_command(
                    "docker",
                    "exec",
                    "--interactive",
                    node,
                    "sh",
                    "-c",
                    script,
                    given=hosts,
                )

    def _start(self, service: Service) -> int:
        with (self.folder / f"{service.name}.log").open("ab") as out:
            process = subprocess.Popen(
                service.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | service.env,
                start_new_session=True,
            )
        return process.pid

    @staticmethod
    def _free_port() -> int:
        for port in range(FIRST_PORT, FIRST_PORT + PORTS):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with suppress(OSError):
                    probe.bind(("0.0.0.0", port))
                    return port
        raise UsageError(
            f"every port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is in use; free one for the registry"
        )

    def down(self) -> None:
        """Delete the cluster, also after a crash; waits for a verb that is changing it."""
        take_down(self.folder, self._remove)

    def _remove(self) -> None:
        with suppress(OSError, ValueError):
            for pid in map(int, (self.folder / "pids").read_text().split()):
                self._stop(pid)
        if docker.containers(self.name):
            delete = [
                "delete",
                "cluster",
                *self._name_option,
                f"--kubeconfig={self.kubeconfig}",
            ]
            run_command(self._kind, *delete, timeout=DELETE_TIMEOUT)
        remove(self.folder)

    def _stop(self, pid: int) -> None:
        # The pid may have been reused by another process; our services have the folder in their arguments.
        with suppress(OSError):
            if os.fsencode(self.folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    # ---- nodes

    def add(self, node: Node) -> None:
        """Raise UsageError: kind cannot add nodes to an existing cluster."""
        raise UsageError(
            f"kind cannot add {node.name} to an existing cluster; delete the cluster and create it with more --nodes"
        )

    def _container(self, node: str) -> str:
        """Return the name of a node's container and Node object: NAME-worker, NAME-worker2, … as kind numbers them."""
        if node == CONTROL_PLANE:
            return f"{self.name}-{CONTROL_PLANE}"
        state = self._state
        state.get_node(node)
        index = state.indexes[node]
        return f"{self.name}-worker{index if index > 1 else ''}"

    @exclusive
    def kill(self, node: str) -> None:
        """Power a node off."""
        self._power_off(node)

    def _power_off(self, node: str) -> None:
        # `docker stop` would be an orderly shutdown, in which pods get SIGTERM.
        run_command("docker", "kill", self._container(node))

    @exclusive
    def revive(self, node: str) -> None:
        """Start the container; its kubelet registers again if the Node object was deleted."""
        started = datetime.now(UTC).replace(microsecond=0)
        run_command("docker", "start", self._container(node))
        self.kube.wait_ready([self._container(node)], READY_WITHIN, since=started)
        self.kube.patch_devices(self._container(node), self._state.nodes[node].devices)

    @exclusive
    def delete(self, node: str) -> None:
        """Kill a node and delete its Node object; the stopped container stays, so that it can be revived."""
        with suppress(TimedOut):
            self._power_off(node)
        self.kube.delete_node(self._container(node))

    @exclusive
    def pause(self, node: str) -> None:
        """Freeze every process of a node."""
        run_command("docker", "pause", self._container(node))

    @exclusive
    def resume(self, node: str) -> None:
        """Thaw a paused node."""
        run_command("docker", "unpause", self._container(node))

    @exclusive
    def partition(self, node: str) -> None:
        """Disconnect a node from the network."""
        run_command(
            "docker", "network", "disconnect", docker.NETWORK, self._container(node)
        )

    @exclusive
    def heal(self, node: str) -> None:
        """Connect a partitioned node again."""
        run_command(
            "docker", "network", "connect", docker.NETWORK, self._container(node)
        )

    @exclusive
    def apply_pressure(self, node: str, pressure: Pressure) -> None:
        """Add thresholds that are always exceeded to the kubelet's configuration, and restart it."""
        added = json.dumps(
            {
                "evictionHard": EXCEEDED_THRESHOLDS[pressure],
                "evictionPressureTransitionPeriod": "5s",
            }
        )
        # YAML does not merge a key that occurs twice, so the script drops the old keys before it appends the new ones.
        script = (
            f"cp -n {_KUBELET} {_ORIGINAL}; "
            f"sed -e '/^evictionHard:/,/^[^ ]/{{/^evictionHard:/d;/^ /d}}' -e '/^evictionPressure/d' "
            f"{_ORIGINAL} > {_KUBELET}; cat >> {_KUBELET}; systemctl restart kubelet"
        )
        lines = "\n".join(
            f"{key}: {json.dumps(value)}" for key, value in json.loads(added).items()
        )
        run_command(
            "docker",
            "exec",
            "--interactive",
            self._container(node),
            "sh",
            "-c",
            script,
            given=f"{lines}\n",
        )

    @exclusive
    def clear_pressure(self, node: str) -> None:
        """Restore the kubelet's configuration, and restart it."""
        script = f"if [ -f {_ORIGINAL} ]; then mv {_ORIGINAL} {_KUBELET}; systemctl restart kubelet; fi"
        run_command("docker", "exec", self._container(node), "sh", "-c", script)

    @exclusive
    def load(self, images: Sequence[str]) -> None:
        """Load images onto every node."""
        self._load(images)

    def _load(self, images: Sequence[str]) -> None:
        nodes = ",".join(map(self._container, self._state.nodes))
        if not nodes:
            return
        for image in images:
            options = (*_source(image), *self._name_option, f"--nodes={nodes}")
            run_command(self._kind, "load", *options, timeout=LOAD_TIMEOUT)


def _source(image: str) -> tuple[str, str]:
    """Return how kind loads an image: from Docker, or from an archive. buildah's images are exported first."""
    if not image.endswith(".tar") and image_builders.ENGINES["docker"].digest(image):
        return "docker-image", image
    return "image-archive", str(image_builders.export(image, cache() / "images"))
