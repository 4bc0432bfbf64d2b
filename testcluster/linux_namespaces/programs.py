"""The programs that a cluster of Linux namespaces needs."""

from testcluster import go_modules

NEEDED = (
    *go_modules.CONTROL_PLANE,
    "kube-proxy",
    "kubelet",
    "kubectl",
    "etcd",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "runc",
    "registry",
    "coredns",
    "kwok",
    "pause",
)
