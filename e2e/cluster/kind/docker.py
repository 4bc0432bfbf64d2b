"""The commands of docker and kind, with their own words when they fail."""

from __future__ import annotations

import os
import subprocess

from e2e.cluster.problems import NotReady

LABEL = "io.x-k8s.kind.cluster"
NETWORK = os.environ.get("KIND_EXPERIMENTAL_DOCKER_NETWORK", "kind")


def run(*command: str, given: str = "", timeout: float = 600) -> str:
    """Run a command and give its output. Raises NotReady with its last words."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as late:
        raise NotReady(f"{' '.join(command[:3])}: no end within {timeout:g} s") from late
    if done.returncode:
        raise NotReady(f"{' '.join(command[:4])}: {(done.stderr.strip() or done.stdout.strip())[-1500:]}")
    return done.stdout


def containers(cluster: str) -> list[str]:
    """Name the containers of a kind cluster, running or not; none where no engine answers."""
    try:
        said = run(
            "docker", "ps", "--all", "--filter", f"label={LABEL}={cluster}", "--format", "{{.Names}}", timeout=30
        )
    except (NotReady, FileNotFoundError):
        return []
    return said.split()


def gateway() -> str:
    """Give this host's address on the network of kind's nodes."""
    said = run("docker", "network", "inspect", NETWORK, "--format", "{{range .IPAM.Config}}{{.Gateway}} {{end}}")
    return next(address for address in said.split() if ":" not in address)
