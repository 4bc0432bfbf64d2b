"""The objects that every cluster gets once its API server answers."""

from testcluster import dns, kwok, volume_provisioner
from testcluster.cluster_state import State
from testcluster.kube import Kube
from testcluster.linux_namespaces.machine import Machine, wait_until
from testcluster.linux_namespaces.network import DNS_SERVICE

READY_WITHIN = 60
"""Seconds until the API server, nodes and CoreDNS must be ready; a few seconds are usual."""


def install(kube: Kube, control_plane: Machine, address: str, state: State) -> None:
    """Install DNS, storage classes and KWOK nodes, and wait until the cluster is ready."""
    kube.wait_api(READY_WITHIN)
    kube.apply(
        [
            *dns.manifests(address, DNS_SERVICE),
            *volume_provisioner.storage_classes(),
        ]
    )
    # CoreDNS had no rights until now, and retries with increasing delays.
    control_plane.restart("coredns")
    kwok.create_nodes(kube, state.kwok_nodes)
    kube.wait_ready(state.nodes, READY_WITHIN)
    wait_until(
        iter(lambda: dns.is_resolving(address), None),
        READY_WITHIN,
        "CoreDNS does not resolve the API server's name",
    )
    for node in state.nodes.values():
        kube.patch_devices(node.name, node.devices)
