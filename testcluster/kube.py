"""The cluster's API through kubectl, with administrator rights."""

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
    """A client of one cluster's API."""

    kubectl: Path
    kubeconfig: Path

    def run(self, *arguments: str, given: str = "", timeout: float = 60) -> str:
        """Run kubectl and return its output; `given` is its standard input. Raises TimedOut with kubectl's error."""
        command = [str(self.kubectl), "--kubeconfig", str(self.kubeconfig), *arguments]
        return run_command(
            *command,
            called=f"kubectl {' '.join(arguments)}",
            given=given,
            timeout=timeout,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run kubectl with `-o json` and return the parsed output."""
        content: dict[str, Any] = json.loads(self.run(*arguments, "-o", "json"))
        return content

    def apply(self, manifests: str | list[dict[str, Any]]) -> None:
        """Apply YAML or objects by server-side apply."""
        text = (
            manifests
            if isinstance(manifests, str)
            else json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        )
        self.run("apply", "--server-side", "--force-conflicts", "-f", "-", given=text)

    def is_ready(self) -> bool:
        """Check whether the API server's /readyz answers ok."""
        try:
            return self.run("get", "--raw", "/readyz", timeout=5) == "ok"
        except TimedOut:
            return False

    def wait_api(self, seconds: float) -> None:
        """Wait until the API server is ready. Raises TimedOut."""
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise TimedOut(f"the API server was not ready within {seconds:g} s")
            time.sleep(0.05)

    def ready_nodes(self, since: datetime | None = None) -> set[str]:
        """Return the names of Ready nodes; with `since`, only of those whose last heartbeat is not older."""
        return {
            node["metadata"]["name"]
            for node in self.json("get", "nodes")["items"]
            if is_ready(node, since)
        }

    def find_nodes(self, name: str) -> list[dict[str, Any]]:
        """Return the Node object of a node, whose own name may differ; an empty list when it is deleted."""
        nodes: list[dict[str, Any]] = self.json("get", "nodes", "-l", f"{NAME}={name}")[
            "items"
        ]
        return nodes

    def wait_ready(
        self, names: Iterable[str], seconds: float, since: datetime | None = None
    ) -> None:
        """Wait until all named nodes are Ready. Raises TimedOut with the Ready condition of each that is not."""
        deadline = time.monotonic() + seconds
        missing = set(names) - self.ready_nodes(since)
        while missing:
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"not Ready after {seconds:g} s: {'; '.join(map(self._ready_message, sorted(missing)))}"
                )
            time.sleep(0.1)
            missing -= self.ready_nodes(since)

    def _ready_message(self, name: str) -> str:
        try:
            conditions = self.json("get", "node", name)["status"]["conditions"]
        except (TimedOut, KeyError):
            return f"{name} never registered"
        messages = [
            condition["message"]
            for condition in conditions
            if condition["type"] == "Ready"
        ]
        return f"{name}: {' '.join(messages)}"

    def patch_devices(self, name: str, devices: dict[str, int]) -> None:
        """Advertise extended resources on a node; the kubelet leaves resources that it does not manage alone."""
        if devices:
            quantities = {device: str(count) for device, count in devices.items()}
            patch = {"status": {"capacity": quantities, "allocatable": quantities}}
            self.run(
                "patch",
                "node",
                name,
                "--subresource=status",
                "--type=merge",
                "-p",
                json.dumps(patch),
            )

    def delete_node(self, name: str) -> None:
        """Delete a Node object, as a cloud controller does when the machine no longer exists."""
        self.run("delete", "node", name, "--ignore-not-found", "--wait=false")


def is_ready(node: dict[str, Any], since: datetime | None = None) -> bool:
    """Check whether a Node object is Ready.

    With `since`, older heartbeats do not count: they are from before the machine was last powered on.
    """
    conditions = node.get("status", {}).get("conditions", [])
    ready = [
        condition
        for condition in conditions
        if condition["type"] == "Ready" and condition["status"] == "True"
    ]
    return any(
        since is None or datetime.fromisoformat(condition["lastHeartbeatTime"]) >= since
        for condition in ready
    )
