"""Logs that outlive a failed cluster."""

import shutil
from contextlib import suppress
from pathlib import Path

from testcluster.cluster_state import cache


def keep_logs(folder: Path, name: str) -> Path:
    """Copy the logs of all machines out of the cluster's folder."""
    kept = cache() / "logs" / name
    shutil.rmtree(kept, ignore_errors=True)
    # The disk may be full. Then some logs are not kept, but the cluster is deleted anyway.
    with suppress(OSError):
        for log in folder.glob("machines/*/log"):
            shutil.copytree(log, kept / log.parent.name)
    return kept
