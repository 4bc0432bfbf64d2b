"""The commands of docker and kind, with their own words when they fail."""

from __future__ import annotations

import os

from testcluster.commands import run_command
from testcluster.errors import TimedOut

LABEL = "io.x-k8s.kind.cluster"
NETWORK = os.environ.get("KIND_EXPERIMENTAL_DOCKER_NETWORK", "kind")


def containers(cluster: str) -> list[str]:
    """Name the containers of a kind cluster, running or not; none where no engine answers."""
    try:
        said = run_command(
            "docker", "ps", "--all", "--filter", f"label={LABEL}={cluster}", "--format", "{{.Names}}", timeout=30
        )
    except (TimedOut, FileNotFoundError):
        return []
    return said.split()


def gateway() -> str:
    """Give this host's address on the network of kind's nodes."""
    said = run_command(
        "docker", "network", "inspect", NETWORK, "--format", "{{range .IPAM.Config}}{{.Gateway}} {{end}}"
    )
    return next(address for address in said.split() if ":" not in address)
