"""Reclamation of a spot node as a cloud does it: give notice, wait for the notice period, delete the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from testcluster.errors import TimedOut, UsageError
from testcluster.kube import Kube
from testcluster.provider import Provider

Notice = Literal["taint", "drain"]
TAINT = "finetune.dev/reclaim=soon:NoExecute"


def reclaim(
    cluster: Provider,
    node: str,
    notice: float,
    by: Notice,
    *,
    report: Callable[[str], None] = print,
) -> None:
    """Announce the reclamation by a NoExecute taint or by a drain, and delete the machine `notice` seconds later.

    Raises UsageError when the node has no Node object, and when it was replaced during the notice period.
    """
    started = time.monotonic()
    kube = cluster.kube
    objects = kube.find_nodes(node)
    if not objects:
        raise UsageError(
            f"{node} has no Node object, it is already deleted; `node revive {node}` creates a fresh one"
        )
    metadata = objects[0]["metadata"]
    report(f"{node}: reclaimed in {notice:g} s, notice by {by}")
    if by == "taint":
        kube.run("taint", "node", metadata["name"], TAINT, "--overwrite")
    else:
        _drain(kube, metadata["name"], notice)
    time.sleep(max(0.0, started + notice - time.monotonic()))
    if any(
        current["metadata"]["uid"] != metadata["uid"]
        for current in kube.find_nodes(node)
    ):
        raise UsageError(
            f"{node} was replaced by another machine, which got no notice; the new machine is left alone"
        )
    cluster.delete(node)
    report(f"{node}: deleted")


def _drain(kube: Kube, node: str, notice: float) -> None:
    options = [
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--force",
        f"--timeout={max(1, int(notice))}s",
    ]
    try:
        kube.run("drain", node, *options, timeout=notice + 10)
    except TimedOut:
        # A disruption budget may forbid the eviction, or a pod may take longer. A cloud takes the machine anyway.
        return
