"""A base image for machines that cannot pull the public one: Debian with Python, created by debootstrap."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from testcluster.cluster_state import cache
from testcluster.errors import UsageError
from testcluster.images.image_builders import Engine

SUITE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-venv"
NAME = f"localhost/finetune-base:{SUITE}"


def provide(engine: Engine, report: Callable[[str], None]) -> str:
    """Create the base image unless the engine has it, and return its name. Raises UsageError."""
    if engine.digest(NAME):
        return NAME
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise UsageError(
            "the public base image cannot be pulled, and creating one needs debootstrap and root; "
            "run `make cluster-deps` as root, or name a base image with --base"
        )
    report(
        f"the public base image cannot be pulled; creating {NAME} by debootstrap (about a minute)"
    )
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".base-") as scratch:
        root = Path(scratch) / "root"
        _run(
            [
                "debootstrap",
                "--variant=minbase",
                f"--include={PACKAGES}",
                SUITE,
                str(root),
            ]
        )
        _slim(root)
        archive = Path(scratch) / "root.tar"
        _run(
            [
                "tar",
                "--numeric-owner",
                "--sort=name",
                "-C",
                str(root),
                "-cf",
                str(archive),
                ".",
            ]
        )
        dockerfile = Path(scratch) / "Dockerfile"
        dockerfile.write_text("FROM scratch\nADD root.tar /\n")
        if engine.name == "docker":
            _run(["docker", "build", "--tag", NAME, scratch])
        else:
            _run(["buildah", "build", "--isolation=chroot", "--tag", NAME, scratch])
    return NAME


def _slim(root: Path) -> None:
    """Delete what an image never reads: package archives, documentation, logs, apt sources."""
    for folder in (
        "var/cache/apt/archives",
        "var/lib/apt/lists",
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
    ):
        shutil.rmtree(root / folder, ignore_errors=True)
    for log in (root / "var/log").rglob("*"):
        if log.is_file():
            log.unlink()
    # Package sources and name servers of the build host do not belong into the image.
    (root / "etc/apt/sources.list").write_text("")
    (root / "etc/resolv.conf").write_text("")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip())[-800:]
        raise UsageError(f"{command[0]} failed: {output}")
