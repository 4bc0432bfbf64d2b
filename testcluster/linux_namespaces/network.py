"""The cluster's own network: one bridge, a cable to each machine, addresses that nothing outside knows.

Host .1, control plane .2, machines from .10 on. Nobody gets a default route: traffic cannot leave.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from testcluster.commands import run_command
from testcluster.errors import TimedOut, UsageError

SERVICES = "10.96.0.0/16"
API_SERVICE, DNS_SERVICE = "10.96.0.1", "10.96.0.10"
PODS = "10.244.0.0/16"
FIRST_MACHINE = 10
MACHINES = 64
CONTROL_PLANE_INDEX = 0
"""The control plane's seat; nodes sit from 1 on."""


def ip(*arguments: str, quietly: bool = False) -> str:
    """Run iproute2's ip. Raises NotReady with its words when it fails, unless told to be quiet about it."""
    try:
        return run_command("ip", *arguments)
    except TimedOut:
        if quietly:
            return ""
        raise


def pods_of(seat: int) -> str:
    """Give the addresses of the pods on the machine of that seat."""
    return f"10.244.{seat}.0/24"


@dataclass(frozen=True)
class Network:
    """The bridge of one cluster; the name is made of its folder's, so that it is found after any crash."""

    mark: str
    subnet: int
    """The third number of 10.89.N.0/24."""

    @property
    def bridge(self) -> str:
        """Name the link; at most 15 letters are allowed."""
        return f"ft{self.mark}"

    @property
    def host(self) -> str:
        """Give this host's address in it."""
        return f"10.89.{self.subnet}.1"

    def address(self, seat: int) -> str:
        """Give the address of a seat."""
        return f"10.89.{self.subnet}.{2 if seat == CONTROL_PLANE_INDEX else FIRST_MACHINE + seat - 1}"

    def cable(self, seat: int) -> VethPair:
        """Give the cable to a seat."""
        return VethPair(self, seat)

    def make(self) -> None:
        """Make the bridge. Raises Refused where root may not change this host's network."""
        try:
            ip("link", "add", self.bridge, "type", "bridge")
        except TimedOut as denied:
            raise UsageError(
                f"{denied}; root of a container or of a user namespace is not enough: "
                "run it as root of the machine, or start a Docker engine and use --provider kind"
            ) from denied
        ip("addr", "add", f"{self.host}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def remove(self) -> None:
        """Remove the bridge and what hangs on it."""
        for link in json.loads(ip("-json", "link", "show", "master", self.bridge, quietly=True) or "[]"):
            ip("link", "del", link["ifname"], quietly=True)
        ip("link", "del", self.bridge, quietly=True)


@dataclass(frozen=True)
class VethPair:
    """The link between the bridge and one machine."""

    network: Network
    seat: int

    @property
    def end(self) -> str:
        """Name the host's end."""
        return f"{self.network.bridge}.{self.seat}"

    @property
    def address(self) -> str:
        """Give the machine's address."""
        return self.network.address(self.seat)

    def routes(self) -> list[list[str]]:
        """Send pods' traffic to the machine they are on, also of machines that are yet to come."""
        others = (seat for seat in range(1, MACHINES) if seat != self.seat)
        to_pods = [[pods_of(seat), "via", self.network.address(seat)] for seat in others]
        return [[SERVICES, "dev", "eth0"], *to_pods]

    def attach(self, pid: int) -> None:
        """Lay it into the network namespace of that process, as eth0."""
        ip("link", "del", self.end, quietly=True)
        peer = ["peer", "name", "eth0", "netns", str(pid)]
        ip("link", "add", self.end, "master", self.network.bridge, "type", "veth", *peer)
        self.set_up()

    def detach(self) -> None:
        """Take it away; a machine that is gone has taken it along."""
        ip("link", "del", self.end, quietly=True)

    def set_up(self) -> None:
        """Let traffic through."""
        ip("link", "set", self.end, "up")

    def set_down(self) -> None:
        """Let none through."""
        ip("link", "set", self.end, "down")


def used_subnets() -> set[int]:
    """Name the numbers N of 10.89.N.0/24 that this host has an address or a route in."""
    known = [route.get("dst", "") for route in json.loads(ip("-json", "-4", "route", "show", "table", "all") or "[]")]
    known += [
        address["local"] for link in json.loads(ip("-json", "-4", "addr") or "[]") for address in link["addr_info"]
    ]
    return {int(text.split(".")[2].partition("/")[0]) for text in known if text.startswith("10.89.")}
