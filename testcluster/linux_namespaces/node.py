"""The programs of a node and their configuration: containerd, kubelet, kube-proxy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.cluster_state import cache
from testcluster.images import image_layers
from testcluster.linux_namespaces.control_plane import REGISTRY_PORT, ControlPlane
from testcluster.linux_namespaces.network import DNS_SERVICE, PODS, pod_subnet
from testcluster.nodes import Node
from testcluster.provider import DEFAULT_THRESHOLDS, EXCEEDED_THRESHOLDS, Pressure
from testcluster.service import Service

PAUSE = "localhost/pause:1"
CNI_PLUGINS = Path("/usr/lib/cni")
"""Where Debian's package containernetworking-plugins installs them."""


@dataclass(frozen=True)
class Programs:
    """The programs of a node, and the folder of their configuration."""

    node: Node
    index: int
    address: str
    folder: Path
    control: ControlPlane

    @property
    def _etc(self) -> Path:
        return self.folder / "etc"

    def configure(self, pressure: Pressure | None = None) -> None:
        """Write every configuration file. With `pressure`, the kubelet gets thresholds that are always exceeded."""
        (self._etc / "cni").mkdir(parents=True, exist_ok=True)
        (self._etc / "cni" / "10-pods.conflist").write_text(json.dumps(self._cni()))
        (self._etc / "containerd.toml").write_text(self._containerd())
        (self._etc / "kubelet.json").write_text(json.dumps(self._kubelet(pressure)))
        (self._etc / "proxy.json").write_text(json.dumps(self._proxy()))
        (self._etc / "resolv.conf").write_text("")
        for name in ("localhost", self.control.address):
            hosts = self._etc / "registries" / f"{name}:{REGISTRY_PORT}" / "hosts.toml"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(
                f'server = "http://{self.control.address}:{REGISTRY_PORT}"\n'
            )

    def services(self) -> list[Service]:
        """Return all programs of the node."""
        kubelet = self.control.kubeconfig(
            f"kubelet-{self.node.name}", f"system:node:{self.node.name}", "system:nodes"
        )
        labels = ",".join(f"{key}={value}" for key, value in self.node.labels.items())
        binaries = self.control.binaries
        return [
            self.containerd(),
            Service(
                "kubelet",
                [
                    str(binaries / "kubelet"),
                    f"--config={self._etc / 'kubelet.json'}",
                    f"--kubeconfig={kubelet}",
                    f"--hostname-override={self.node.name}",
                    f"--node-ip={self.address}",
                    f"--node-labels={labels}",
                ],
            ),
            Service(
                "kube-proxy",
                [str(binaries / "kube-proxy"), f"--config={self._etc / 'proxy.json'}"],
            ),
        ]

    def containerd(self) -> Service:
        """Return the container runtime alone."""
        path = f"{self.control.binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        command = [
            str(self.control.binaries / "containerd"),
            "--config",
            str(self._etc / "containerd.toml"),
        ]
        return Service("containerd", command, {"PATH": path})

    def _cni(self) -> dict[str, Any]:
        bridge = {
            "type": "bridge",
            "bridge": "pods",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": pod_subnet(self.index)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}

    def _containerd(self) -> str:
        return f"""version = 3
disabled_plugins = [
  "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.blockfile",
]
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{self._etc / "registries"}"
[plugins."io.containerd.cri.v1.runtime"]
  # Without CAP_SYS_RESOURCE a process may not set an oom_score_adj below its own.
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{CNI_PLUGINS}"]
  conf_dir = "{self._etc / "cni"}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""

    def _kubelet(self, pressure: Pressure | None) -> dict[str, Any]:
        taints = [
            {"key": taint.key, "value": taint.value, "effect": taint.effect}
            for taint in self.node.taints
        ]
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "x509": {"clientCAFile": str(self.control.authority.pair.certificate)},
                "webhook": {"enabled": True},
                "anonymous": {"enabled": False},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self._etc / "resolv.conf"),
            "registerWithTaints": taints,
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "healthzPort": 0,
            "nodeStatusUpdateFrequency": "4s",
            "nodeLeaseDurationSeconds": 16,
            "evictionHard": DEFAULT_THRESHOLDS
            | (EXCEEDED_THRESHOLDS[pressure] if pressure else {}),
            "evictionPressureTransitionPeriod": "5s",
            "imageGCHighThresholdPercent": 100,
            "serializeImagePulls": False,
            "shutdownGracePeriod": "0s",
        }

    def _proxy(self) -> dict[str, Any]:
        config = self.control.kubeconfig("kube-proxy", "system:kube-proxy")
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": str(config)},
            "hostnameOverride": self.node.name,
            "clusterCIDR": PODS,
            "healthzBindAddress": "",
            "metricsBindAddress": "127.0.0.1:10249",
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }


def own_images(binaries: Path) -> list[Path]:
    """Return the archives of the images that every node has: pause and the toolbox."""
    folder = cache() / "images"
    pause = image_layers.archive(
        folder, PAUSE, {"pause": binaries / "pause"}, ["/pause"]
    )
    busybox = image_layers.busybox()
    tools = {f"bin/{name}": busybox for name in ("busybox", "sh")}
    return [
        pause,
        image_layers.archive(folder, image_layers.TOOLBOX, tools, ["/bin/sh"]),
    ]
