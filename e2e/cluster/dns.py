"""Names inside the cluster: CoreDNS beside the control plane, behind the Service that pods are told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RULES: list[dict[str, Any]] = [
    {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
]


def corefile(address: str, kubeconfig: Path) -> str:
    """Configure CoreDNS: the cluster's names, and no others; there is nobody to ask."""
    return f""".:53 {{
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


def manifests(address: str, service: str) -> list[dict[str, Any]]:
    """Give the Service kube-dns, its endpoint beside the control plane, and what CoreDNS may read."""
    ports = [{"name": f"dns-{protocol.lower()}", "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    metadata = {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    slice_metadata = {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"clusterIP": service, "ports": ports}},
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
            "rules": RULES,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": role["name"]},
            "roleRef": role,
            "subjects": [{"kind": "User", "name": "system:coredns", "apiGroup": "rbac.authorization.k8s.io"}],
        },
    ]
