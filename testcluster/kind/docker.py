"""Queries of the Docker engine about the containers and the network of kind."""

from __future__ import annotations

import os

from testcluster.commands import run_command
from testcluster.errors import TimedOut

LABEL = "io.x-k8s.kind.cluster"
NETWORK = os.environ.get("KIND_EXPERIMENTAL_DOCKER_NETWORK", "kind")


def containers(cluster: str) -> list[str]:
    """Return the containers of a kind cluster, running or not; an empty list if no engine answers."""
    try:
        output = run_command(
            "docker",
            "ps",
            "--all",
            "--filter",
            f"label={LABEL}={cluster}",
            "--format",
            "{{.Names}}",
            timeout=30,
        )
    except (TimedOut, FileNotFoundError):
        return []
    return output.split()


def gateway() -> str:
    """Return the host's IPv4 address on the network of kind's nodes."""
    output = run_command(
        "docker",
        "network",
        "inspect",
        NETWORK,
        "--format",
        "{{range .IPAM.Config}}{{.Gateway}} {{end}}",
    )
    return next(address for address in output.split() if ":" not in address)
