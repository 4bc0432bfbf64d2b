"""What a cloud does with a spot machine: it says so, waits as long as it promised, and takes the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from testcluster.errors import TimedOut, UsageError
from testcluster.kube import Kube
from testcluster.provider import Provider

Notice = Literal["taint", "drain"]
TAINT = "finetune.dev/reclaim=soon:NoExecute"


def reclaim(cluster: Provider, node: str, notice: float, by: Notice, *, say: Callable[[str], None] = print) -> None:
    """Give notice by a NoExecute taint or by draining, and `notice` seconds later turn the machine off for good.

    Raises Refused for a node that is gone, and when it was replaced during the notice.
    """
    begun, kube = time.monotonic(), cluster.kube
    found = kube.nodes_called(node)
    if not found:
        raise UsageError(f"{node} has no Node object: it is gone already; `node revive {node}` brings a fresh one")
    known = found[0]["metadata"]
    say(f"{node}: reclaimed in {notice:g} s; notice by {by}")
    if by == "taint":
        kube.run("taint", "node", known["name"], TAINT, "--overwrite")
    else:
        _drain(kube, known["name"], notice)
    time.sleep(max(0.0, begun + notice - time.monotonic()))
    if any(now["metadata"]["uid"] != known["uid"] for now in kube.nodes_called(node)):
        raise UsageError(f"{node} is another machine by now, which got no notice; it is left alone")
    cluster.delete(node)
    say(f"{node}: gone")


def _drain(kube: Kube, node: str, notice: float) -> None:
    how = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={max(1, int(notice))}s"]
    try:
        kube.run("drain", node, *how, timeout=notice + 10)
    except TimedOut:
        # A budget may forbid the eviction, or a pod may take longer: the machine is taken all the same.
        return
