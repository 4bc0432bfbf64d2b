"""What the verbs ask of the cluster's API, through kubectl, as its administrator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from testcluster.commands import run_command
from testcluster.errors import TimedOut
from testcluster.nodes import NAME


@dataclass(frozen=True)
class Kube:
    """One cluster's API."""

    kubectl: Path
    kubeconfig: Path

    def run(self, *arguments: str, given: str = "", timeout: float = 60) -> str:
        """Run kubectl and give its output. Raises NotReady with kubectl's own words."""
        command = [str(self.kubectl), "--kubeconfig", str(self.kubeconfig), *arguments]
        return run_command(*command, called=f"kubectl {' '.join(arguments)}", given=given, timeout=timeout)

    def json(self, *arguments: str) -> dict[str, Any]:
        """Get something as JSON."""
        told: dict[str, Any] = json.loads(self.run(*arguments, "-o", "json"))
        return told

    def apply(self, manifests: str | list[dict[str, Any]]) -> None:
        """Apply YAML, or objects, as the server sees it (server-side apply)."""
        text = (
            manifests
            if isinstance(manifests, str)
            else json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        )
        self.run("apply", "--server-side", "--force-conflicts", "-f", "-", given=text)

    def is_ready(self) -> bool:
        """Tell whether the API server calls itself ready."""
        try:
            return self.run("get", "--raw", "/readyz", timeout=5) == "ok"
        except TimedOut:
            return False

    def wait_api(self, seconds: float) -> None:
        """Wait until the API server answers. Raises NotReady when it does not."""
        until = time.monotonic() + seconds
        while not self.is_ready():
            if time.monotonic() > until:
                raise TimedOut(f"the API server did not answer within {seconds:g} s")
            time.sleep(0.05)

    def ready_nodes(self, since: datetime | None = None) -> set[str]:
        """Name the nodes whose kubelet says Ready, and has said so since then."""
        return {node["metadata"]["name"] for node in self.json("get", "nodes")["items"] if is_ready(node, since)}

    def nodes_called(self, name: str) -> list[dict[str, Any]]:
        """Give the Node object of that node, which may itself be called otherwise; none when it is gone."""
        found: list[dict[str, Any]] = self.json("get", "nodes", "-l", f"{NAME}={name}")["items"]
        return found

    def wait_ready(self, names: Iterable[str], seconds: float, since: datetime | None = None) -> None:
        """Wait until all of them are Ready. Raises NotReady naming those that are not, and what they say."""
        missing = set(names)
        until = time.monotonic() + seconds
        while missing := missing - self.ready_nodes(since):
            if time.monotonic() > until:
                raise TimedOut(f"not Ready after {seconds:g} s: {'; '.join(map(self._says, sorted(missing)))}")
            time.sleep(0.1)

    def _says(self, name: str) -> str:
        try:
            conditions = self.json("get", "node", name)["status"]["conditions"]
        except (TimedOut, KeyError):
            return f"{name} never registered"
        said = [condition["message"] for condition in conditions if condition["type"] == "Ready"]
        return f"{name}: {' '.join(said)}"

    def patch_devices(self, name: str, devices: dict[str, int]) -> None:
        """Advertise extended resources; the kubelet keeps what it does not know."""
        if devices:
            offered = {device: str(count) for device, count in devices.items()}
            patch = {"status": {"capacity": offered, "allocatable": offered}}
            self.run("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(patch))

    def delete_node(self, name: str) -> None:
        """Take the Node object away, as a cloud's controller does for a machine that is gone."""
        self.run("delete", "node", name, "--ignore-not-found", "--wait=false")


def is_ready(node: dict[str, Any], since: datetime | None = None) -> bool:
    """Tell whether a Node object says Ready; what a machine said before it was last turned on does not count."""
    conditions = node.get("status", {}).get("conditions", [])
    ready = [condition for condition in conditions if condition["type"] == "Ready" and condition["status"] == "True"]
    return any(since is None or datetime.fromisoformat(condition["lastHeartbeatTime"]) >= since for condition in ready)
