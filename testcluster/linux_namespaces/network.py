"""The network of a cluster: one bridge, and a veth pair to each machine. Its addresses are unknown outside the host.

The host is .1, the control plane .2, and nodes start at .10. No machine has a default route, so traffic cannot leave.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from testcluster.commands import run_command
from testcluster.errors import TimedOut, UsageError

SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
PODS = "10.244.0.0/16"
FIRST_NODE_ADDRESS = 10
"""Last number of the address of the node with index 1."""
MACHINES = 64
"""Number of indexes; every machine has routes to the pods of all of them."""
CONTROL_PLANE_INDEX = 0
"""Index of the control plane's machine; nodes have indexes from 1."""


def ip(*arguments: str, ignore_errors: bool = False) -> str:
    """Run iproute2's `ip` and return its output. Raises TimedOut with its error, unless errors are ignored."""
    try:
        return run_command("ip", *arguments)
    except TimedOut:
        if ignore_errors:
            return ""
        raise


def pod_subnet(index: int) -> str:
    """Return the subnet of the pods on the machine with that index."""
    return f"10.244.{index}.0/24"


@dataclass(frozen=True)
class Network:
    """The bridge of a cluster. Its name follows from the cluster's folder, so it can be found after any crash."""

    mark: str
    subnet: int
    """The third number of 10.89.N.0/24."""

    @property
    def bridge(self) -> str:
        """Return the name of the bridge; the kernel allows 15 characters."""
        return f"ft{self.mark}"

    @property
    def host(self) -> str:
        """Return the host's address on the bridge."""
        return f"10.89.{self.subnet}.1"

    def address(self, index: int) -> str:
        """Return the address of the machine with that index."""
        return f"10.89.{self.subnet}.{2 if index == CONTROL_PLANE_INDEX else FIRST_NODE_ADDRESS + index - 1}"

    def veth_pair(self, index: int) -> VethPair:
        """Return the veth pair of the machine with that index."""
        return VethPair(self, index)

    def create(self) -> None:
        """Create the bridge. Raises UsageError if root may not change the host's network."""
        try:
            ip("link", "add", self.bridge, "type", "bridge")
        except TimedOut as denied:
            raise UsageError(
                f"{denied}; root of a container or of a user namespace is not enough: "
                "run it as root of the host, or start a Docker engine and use --provider kind"
            ) from denied
        ip("addr", "add", f"{self.host}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def remove(self) -> None:
        """Delete the bridge and the links attached to it."""
        for link in json.loads(
            ip("-json", "link", "show", "master", self.bridge, ignore_errors=True)
            or "[]"
        ):
            ip("link", "del", link["ifname"], ignore_errors=True)
        ip("link", "del", self.bridge, ignore_errors=True)


@dataclass(frozen=True)
class VethPair:
    """The pair of links between the bridge and a machine."""

    network: Network
    index: int

    @property
    def end(self) -> str:
        """Return the name of the host's end."""
        return f"{self.network.bridge}.{self.index}"

    @property
    def address(self) -> str:
        """Return the machine's address."""
        return self.network.address(self.index)

    def routes(self) -> list[list[str]]:
        """Return the routes to services and to the pods of every machine, including machines created later."""
        others = (index for index in range(1, MACHINES) if index != self.index)
        to_pods = [
            [pod_subnet(index), "via", self.network.address(index)] for index in others
        ]
        return [[SERVICES, "dev", "eth0"], *to_pods]

    def attach(self, pid: int) -> None:
        """Create the pair with its machine end in the network namespace of that process, as eth0."""
        ip("link", "del", self.end, ignore_errors=True)
        peer = ["peer", "name", "eth0", "netns", str(pid)]
        ip(
            "link",
            "add",
            self.end,
            "master",
            self.network.bridge,
            "type",
            "veth",
            *peer,
        )
        self.set_up()

    def detach(self) -> None:
        """Delete the pair, if it still exists: the kernel deletes it with the machine's network namespace."""
        ip("link", "del", self.end, ignore_errors=True)

    def set_up(self) -> None:
        """Set the host's end up: traffic flows."""
        ip("link", "set", self.end, "up")

    def set_down(self) -> None:
        """Set the host's end down: traffic stops."""
        ip("link", "set", self.end, "down")


def used_subnets() -> set[int]:
    """Return each number N for which this host has an address or a route in 10.89.N.0/24."""
    addresses = [
        route.get("dst", "")
        for route in json.loads(
            ip("-json", "-4", "route", "show", "table", "all") or "[]"
        )
    ]
    addresses += [
        address["local"]
        for link in json.loads(ip("-json", "-4", "addr") or "[]")
        for address in link["addr_info"]
    ]
    return {
        int(text.split(".")[2].partition("/")[0])
        for text in addresses
        if text.startswith("10.89.")
    }
