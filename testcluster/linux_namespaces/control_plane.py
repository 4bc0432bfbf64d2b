"""The programs of the control plane, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testcluster.linux_namespaces.certificates import Authority
from testcluster.linux_namespaces.network import API_SERVICE, SERVICES
from testcluster.service import Service
from testcluster.state import locked

GRACE = "16s"
"""How long a node may be silent before it counts as lost; 50 s by default, too long for a test."""
REGISTRY_PORT = 5000


@dataclass(frozen=True)
class ControlPlane:
    """Where the control plane of one cluster keeps its things."""

    cluster: str
    address: str
    folder: Path
    binaries: Path
    authority: Authority

    @property
    def url(self) -> str:
        """Give the API server's address."""
        return f"https://{self.address}:6443"

    def kubeconfig(self, name: str, subject: str, group: str = "") -> Path:
        """Give a kubeconfig with a client certificate of that subject, made at the first call."""
        path = self.authority.folder / f"{name}.kubeconfig"
        # Nodes that start at once share some of them.
        with locked(self.authority.folder):
            if path.exists():
                return path
            pair = self.authority.issue(name, subject, group)
            return self.authority.kubeconfig(path, self.url, pair, self.cluster)

    def services(self, dns: Path, registry: Path) -> list[Service]:
        """List all programs; each waits for the others by itself."""
        return [
            self._etcd(),
            self._api_server(),
            self._controllers(),
            self._scheduler(),
            Service("coredns", [str(self.binaries / "coredns"), "-conf", str(dns)]),
            Service(
                "registry", [str(self.binaries / "registry"), "serve", str(registry)], {"OTEL_TRACES_EXPORTER": "none"}
            ),
        ]

    def _etcd(self) -> Service:
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        arguments = {
            "name": "default",
            "data-dir": self.folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            # Nobody mourns this data when the power of the real machine fails.
            "unsafe-no-fsync": "true",
            "log-level": "warn",
        }
        return self._service("etcd", arguments)

    def _api_server(self) -> Service:
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
        serving = self.authority.issue(
            "apiserver", "kube-apiserver", serves=(self.address, "127.0.0.1", API_SERVICE, "localhost", *names)
        )
        to_kubelets = self.authority.issue(
            "apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters"
        )
        arguments = {
            "etcd-servers": "http://127.0.0.1:2379",
            "advertise-address": self.address,
            "secure-port": 6443,
            "tls-cert-file": serving.certificate,
            "tls-private-key-file": serving.key,
            "client-ca-file": self.authority.pair.certificate,
            "kubelet-client-certificate": to_kubelets.certificate,
            "kubelet-client-key": to_kubelets.key,
            # Without it `kubectl logs` looks the node's name up in a DNS that does not know it.
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-signing-key-file": self._tokens,
            "service-account-key-file": self._tokens,
            "service-cluster-ip-range": SERVICES,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
        }
        return self._service("kube-apiserver", arguments)

    @property
    def _tokens(self) -> Path:
        path = self.authority.folder / "service-accounts.key"
        return path if path.exists() else self.authority.signing_key("service-accounts")

    def _controllers(self) -> Service:
        config = self.kubeconfig("controllers", "system:kube-controller-manager")
        arguments = {
            "kubeconfig": config,
            "use-service-account-credentials": "true",
            "root-ca-file": self.authority.pair.certificate,
            "service-account-private-key-file": self._tokens,
            "cluster-signing-cert-file": self.authority.pair.certificate,
            "cluster-signing-key-file": self.authority.pair.key,
            "node-monitor-grace-period": GRACE,
            "node-monitor-period": "2s",
            "kube-api-qps": 500,
            "kube-api-burst": 1000,
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
        }
        return self._service("kube-controller-manager", arguments)

    def _scheduler(self) -> Service:
        config = self.kubeconfig("scheduler", "system:kube-scheduler")
        arguments = {
            "kubeconfig": config,
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
        }
        return self._service("kube-scheduler", arguments)

    def _service(self, name: str, arguments: dict[str, object]) -> Service:
        flags = [f"--{key}={value}" for key, value in arguments.items()]
        return Service(name, [str(self.binaries / name), *flags])
