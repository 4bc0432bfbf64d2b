"""Thresholds at which a kubelet evicts pods, and how to make it believe that it is past them."""

from testcluster.provider import Pressure

DEFAULT_THRESHOLDS = {
    "memory.available": "100Mi",
    "nodefs.available": "1Gi",
    "nodefs.inodesFree": "1%",
    "imagefs.available": "1Gi",
    "pid.available": "1%",
}
EXCEEDED_THRESHOLDS: dict[Pressure, dict[str, str]] = {
    "memory": {"memory.available": "99.99%"},
    "disk": {"nodefs.available": "99.99%"},
    "pids": {"pid.available": "99.99%"},
}
"""A healthy machine is always below these: the kubelet then does all that it does under true pressure."""
