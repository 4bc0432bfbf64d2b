"""The programs of the control plane and their options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testcluster import binaries, go_modules
from testcluster.cluster_state import locked
from testcluster.linux_namespaces.certificates import Authority
from testcluster.linux_namespaces.network import API_SERVICE, SERVICES
from testcluster.provider import AUDIT_LOG, USUAL_CONTROL_PLANE, ControlPlaneOptions
from testcluster.service import Service

GRACE_PERIOD = "16s"
"""Time without a heartbeat after which a node is not Ready. The default of 50 s is too long for a test."""
REGISTRY_PORT = 5000


@dataclass(frozen=True)
class ControlPlane:
    """Address, folder, programs and certificates of a cluster's control plane."""

    cluster: str
    address: str
    folder: Path
    binaries: Path
    authority: Authority

    @property
    def url(self) -> str:
        """Return the URL of the API server."""
        return f"https://{self.address}:6443"

    def kubeconfig(self, name: str, subject: str, group: str = "") -> Path:
        """Return a kubeconfig with a client certificate for the subject; the first call creates it."""
        path = self.authority.folder / f"{name}.kubeconfig"
        # Nodes start in parallel and share some kubeconfigs.
        with locked(self.authority.folder):
            if path.exists():
                return path
            pair = self.authority.issue(name, subject, group)
            return self.authority.kubeconfig(path, self.url, pair, self.cluster)

    def services(
        self,
        dns: Path,
        registry: Path,
        options: ControlPlaneOptions = USUAL_CONTROL_PLANE,
    ) -> list[Service]:
        """Return all programs; each waits by itself until the programs it needs are up."""
        usual = self._usual_services(dns, registry)
        usual = [_of_version(service, options.kubernetes) for service in usual]
        audit = {
            "kube-apiserver": self._audit_flags(options.audit_policy)
            if options.audit_policy
            else {}
        }
        # The last of two flags of the same name counts.
        return [
            _with_flags(_with_flags(service, audit), options.flags) for service in usual
        ]

    def _audit_flags(self, policy: Mapping[str, Any]) -> dict[str, object]:
        path = self.folder / "etc" / "audit-policy.yaml"
        path.write_text(
            json.dumps({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", **policy})
        )
        # One file: a size of 0 disables rotation.
        return {
            "audit-policy-file": path,
            "audit-log-path": self.folder.parents[1] / AUDIT_LOG,
            "audit-log-maxsize": 0,
        }

    def _usual_services(self, dns: Path, registry: Path) -> list[Service]:
        return [
            self._etcd(),
            self._api_server(),
            self._controller_manager(),
            self._scheduler(),
            Service("coredns", [str(self.binaries / "coredns"), "-conf", str(dns)]),
            Service(
                "registry",
                [str(self.binaries / "registry"), "serve", str(registry)],
                {"OTEL_TRACES_EXPORTER": "none"},
            ),
        ]

    def _etcd(self) -> Service:
        client = "http://127.0.0.1:2379"
        peer = "http://127.0.0.1:2380"
        arguments = {
            "name": "default",
            "data-dir": self.folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            # The data of a test cluster need not survive a power failure of the host.
            "unsafe-no-fsync": "true",
            "log-level": "warn",
        }
        return self._service("etcd", arguments)

    def _api_server(self) -> Service:
        names = (
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        )
        serving = self.authority.issue(
            "apiserver",
            "kube-apiserver",
            serves=(self.address, "127.0.0.1", API_SERVICE, "localhost", *names),
        )
        to_kubelets = self.authority.issue(
            "apiserver-kubelet-client",
            "kube-apiserver-kubelet-client",
            "system:masters",
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
            # Without it `kubectl logs` would resolve the node's name, which no DNS server knows.
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-signing-key-file": self._token_key,
            "service-account-key-file": self._token_key,
            "service-cluster-ip-range": SERVICES,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
        }
        return self._service("kube-apiserver", arguments)

    @property
    def _token_key(self) -> Path:
        path = self.authority.folder / "service-accounts.key"
        return path if path.exists() else self.authority.signing_key("service-accounts")

    def _controller_manager(self) -> Service:
        config = self.kubeconfig("controllers", "system:kube-controller-manager")
        arguments = {
            "kubeconfig": config,
            "use-service-account-credentials": "true",
            "root-ca-file": self.authority.pair.certificate,
            "service-account-private-key-file": self._token_key,
            "cluster-signing-cert-file": self.authority.pair.certificate,
            "cluster-signing-key-file": self.authority.pair.key,
            "node-monitor-grace-period": GRACE_PERIOD,
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


def older_programs(kubernetes: str) -> list[str]:
    """Return the names of the programs of a control plane of another version; none for an empty version."""
    return (
        [f"{name}-{kubernetes}" for name in go_modules.CONTROL_PLANE]
        if kubernetes
        else []
    )


def _of_version(service: Service, kubernetes: str) -> Service:
    """Return the service with the program of a version of Kubernetes, if it has a program of Kubernetes."""
    name = f"{service.name}-{kubernetes}"
    if name not in older_programs(kubernetes):
        return service
    return replace(service, argv=[str(binaries.folder(name) / name), *service.argv[1:]])


def _with_flags(service: Service, flags: Mapping[str, Mapping[str, object]]) -> Service:
    """Return the service with its flags of `flags`, which has them by the service's name, added at the end."""
    added = [f"--{key}={value}" for key, value in flags.get(service.name, {}).items()]
    return replace(service, argv=[*service.argv, *added])


def registry_config(folder: Path) -> str:
    """Return the configuration of the registry, which stores its content in this folder."""
    return f"""version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}}}, delete: {{enabled: true}}}}
http: {{addr: ":{REGISTRY_PORT}"}}
"""
