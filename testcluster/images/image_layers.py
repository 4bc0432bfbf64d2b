"""Small images of static programs, created without an engine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
from pathlib import Path

from testcluster.errors import UsageError

NONROOT = "65532:65532"
"""User and group of the images."""
TOOLBOX = "localhost/toolbox:1"
"""A small image with busybox; every node of a cluster has it."""


def layer(programs: dict[str, Path]) -> bytes:
    """Return an uncompressed layer with executables, {path in the image: file}, and a world-writable /tmp."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as files:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            folder = tarfile.TarInfo(name)
            folder.type = tarfile.DIRTYPE
            folder.mode = mode
            files.addfile(folder)
        for path, program in programs.items():
            member = tarfile.TarInfo(path)
            member.size = program.stat().st_size
            member.mode = 0o755
            with program.open("rb") as data:
                files.addfile(member, data)
    return content.getvalue()


def config(
    layers: list[bytes],
    entrypoint: list[str],
    *,
    user: str = NONROOT,
    path: str = "/bin",
) -> bytes:
    """Return the config of an image that runs, by default, as a user without rights."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(
        platform.machine(), platform.machine()
    )
    process = {"Entrypoint": entrypoint, "User": user, "Env": [f"PATH={path}"]}
    rootfs = {
        "type": "layers",
        "diff_ids": [
            f"sha256:{hashlib.sha256(content).hexdigest()}" for content in layers
        ],
    }
    return json.dumps(
        {"architecture": machine, "os": "linux", "config": process, "rootfs": rootfs}
    ).encode()


def archive(
    folder: Path,
    name: str,
    programs: dict[str, Path],
    entrypoint: list[str],
    *,
    user: str = NONROOT,
    path: str = "/bin",
) -> Path:
    """Write a docker-archive unless it exists, and return its path, which contains a digest of the content."""
    content = layer(programs)
    image_config = config([content], entrypoint, user=user, path=path)
    manifest = json.dumps(
        [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    ).encode()
    digest = hashlib.sha256(image_config + manifest).hexdigest()[:16]
    target = folder / f"{name.rpartition('/')[2].replace(':', '-')}-{digest}.tar"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        with tarfile.open(fresh, "w") as files:
            for part, data in {
                "config.json": image_config,
                "manifest.json": manifest,
                "layer.tar": content,
            }.items():
                member = tarfile.TarInfo(part)
                member.size = len(data)
                files.addfile(member, io.BytesIO(data))
        fresh.replace(target)
    return target


def busybox() -> Path:
    """Return the static busybox that test images contain. Raises UsageError when it is not installed."""
    for path in ("/bin/busybox", "/usr/bin/busybox"):
        if Path(path).exists():
            return Path(path)
    raise UsageError(
        "busybox is missing; `make cluster-deps` installs it (Debian: apt install busybox-static)"
    )
