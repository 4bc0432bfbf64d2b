"""An OCI runtime in front of runc, for machines whose root lacks capabilities: `oci_runtime.py RUNC ARGUMENTS…`.

For a privileged container Docker asks for every capability of the kernel. runc refuses them all if root lacks one.
This program removes from the container's configuration what root cannot grant, and then becomes runc. It imports the
standard library only, because every `docker exec` waits for it.
"""

import json
import os
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = re.findall(
    r"\w+",
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN "
    "SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE "
    "MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE",
)
"""The capabilities of Linux in the order of their numbers."""


def main(runc: str, arguments: Sequence[str]) -> None:
    """Change the configuration that runc will read, and become runc."""
    if "exec" in arguments and "--process" in arguments:
        file = Path(arguments[arguments.index("--process") + 1])
        process = json.loads(file.read_text())
        file.write_text(json.dumps(limited(process)))
    elif "--bundle" in arguments:
        file = Path(arguments[arguments.index("--bundle") + 1]) / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"process": limited(config["process"])}))
    os.execv(runc, [runc, *arguments])  # noqa: S606 -- becomes runc, with the arguments that Docker gave


def limited(process: dict[str, Any]) -> dict[str, Any]:
    """Return the process without capabilities, OOM scores and limits that this root cannot grant."""
    if not is_needed():
        return process
    granted = granted_capabilities()
    capabilities = {
        key: [name for name in names if name in granted]
        for key, names in (process.get("capabilities") or {}).items()
    }
    changed: dict[str, Any] = {
        "capabilities": capabilities,
        "rlimits": list(map(_reachable, process.get("rlimits") or [])),
    }
    if "oomScoreAdj" in process:
        changed["oomScoreAdj"] = max(
            process["oomScoreAdj"], int(Path("/proc/self/oom_score_adj").read_text())
        )
    return process | changed


def known_capabilities() -> list[str]:
    """Return the names of the capabilities that this kernel knows."""
    return NAMES[: int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1]


def granted_capabilities() -> set[str]:
    """Return the capabilities in the bounding set of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    bounding = next(
        int(line.split()[1], 16) for line in status if line.startswith("CapBnd:")
    )
    return {
        f"CAP_{name}" for number, name in enumerate(NAMES) if bounding >> number & 1
    }


def is_needed() -> bool:
    """Check whether this machine's root lacks a capability."""
    return not granted_capabilities() >= {
        f"CAP_{name}" for name in known_capabilities()
    }


def _reachable(limit: dict[str, Any]) -> dict[str, Any]:
    """Return a limit that is not above this process's hard limit, which only CAP_SYS_RESOURCE may raise."""
    hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
    if hard == resource.RLIM_INFINITY:
        return limit
    return limit | {key: min(limit[key], hard) for key in ("hard", "soft")}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
