"""Processes that a killed command left behind, outside the control groups of its cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def leftover_processes(folder: Path) -> Iterable[int]:
    """Yield the pids of the cluster's processes that are in none of its control groups.

    These are first processes of machines that have not entered their group yet, and kubectl or image engine processes
    that a killed `up` had started.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        # A process may end between the listing of /proc and the read.
        with suppress(OSError):
            arguments = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
            is_init = "-ISE" in arguments and any(
                text.startswith(f"{folder}/machines/") for text in arguments
            )
            is_kubectl = f"{folder}/kubeconfig" in arguments
            is_export = any(
                text.startswith((f"docker-archive:{folder}/", f"--output={folder}/"))
                for text in arguments
            )
            if is_init or is_kubectl or is_export:
                yield int(entry.name)
