"""DNS of the cluster: CoreDNS on the control plane's machine, behind the Service kube-dns."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

_PORT = 53

POLICY_RULES: list[dict[str, Any]] = [
    {
        "apiGroups": [""],
        "resources": ["services", "pods", "namespaces"],
        "verbs": ["list", "watch"],
    },
    {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["list", "watch"],
    },
]


def corefile(address: str, kubeconfig: Path) -> str:
    """Return the Corefile. It serves the cluster's names only; there is no upstream server to forward to."""
    return f""".:{_PORT} {{
  bind {address}
  errors
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {kubeconfig}
    pods insecure
    ttl 5
  }}
  cache 5
}}
"""


def is_resolving(address: str) -> bool:
    """Check whether CoreDNS resolves the API server's name, by one query for an A record (RFC 1035, section 4.1)."""
    labels = b"kubernetes.default.svc.cluster.local".split(b".")
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    query = struct.pack(">6H", 1, 0x0100, 1, 0, 0, 0) + name + struct.pack(">2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client, suppress(OSError):
        client.settimeout(0.5)
        client.connect((address, _PORT))
        client.send(query)
        _, flags, _, answers, _, _ = struct.unpack(">6H", client.recv(512)[:12])
        # The low four bits of the flags are the response code; 0 is NOERROR.
        return bool(answers and flags & 0xF == 0)
    return False


def manifests(address: str, service: str) -> list[dict[str, Any]]:
    """Return the Service kube-dns, its endpoint on the control plane's machine, and CoreDNS's role and binding."""
    ports = [
        {"name": f"dns-{protocol.lower()}", "port": _PORT, "protocol": protocol}
        for protocol in ("UDP", "TCP")
    ]
    metadata = {
        "name": "kube-dns",
        "namespace": "kube-system",
        "labels": {"k8s-app": "kube-dns"},
    }
    slice_metadata = {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}}
    role = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "system:coredns",
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": service, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": slice_metadata,
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": ports,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": role["name"]},
            "rules": POLICY_RULES,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": role["name"]},
            "roleRef": role,
            "subjects": [
                {
                    "kind": "User",
                    "name": "system:coredns",
                    "apiGroup": "rbac.authorization.k8s.io",
                }
            ],
        },
    ]
