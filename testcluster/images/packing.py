"""Small images of static programs, packed without an engine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
from pathlib import Path

from testcluster.errors import UsageError

NOBODY = "65532:65532"
TOOLBOX = "localhost/toolbox:1"
"""A small image with busybox; every node of a cluster has it."""


def layer(programs: dict[str, Path]) -> bytes:
    """Give an uncompressed layer of executables, {path inside: file here}, with a /tmp that everybody may write to."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as files:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            files.addfile(folder)
        for inside, program in programs.items():
            member = tarfile.TarInfo(inside)
            member.size, member.mode = program.stat().st_size, 0o755
            with program.open("rb") as data:
                files.addfile(member, data)
    return content.getvalue()


def config(layers: list[bytes], entrypoint: list[str]) -> bytes:
    """Give the config of an image that runs as nobody."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    runs = {"Entrypoint": entrypoint, "User": NOBODY, "Env": ["PATH=/bin"]}
    below = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in layers]}
    return json.dumps({"architecture": machine, "os": "linux", "config": runs, "rootfs": below}).encode()


def archive(folder: Path, name: str, programs: dict[str, Path], entrypoint: list[str]) -> Path:
    """Write a docker-archive, named by its content, unless it is there."""
    content = layer(programs)
    described = config([content], entrypoint)
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    known = hashlib.sha256(described + manifest).hexdigest()[:16]
    target = folder / f"{name.rpartition('/')[2].replace(':', '-')}-{known}.tar"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        with tarfile.open(fresh, "w") as files:
            for part, data in {"config.json": described, "manifest.json": manifest, "layer.tar": content}.items():
                member = tarfile.TarInfo(part)
                member.size = len(data)
                files.addfile(member, io.BytesIO(data))
        fresh.replace(target)
    return target


def busybox() -> Path:
    """Find the static busybox that test images are made of. Raises Refused when there is none."""
    for place in ("/bin/busybox", "/usr/bin/busybox"):
        if Path(place).exists():
            return Path(place)
    raise UsageError("busybox is missing; `make cluster-deps` installs it (Debian: apt install busybox-static)")
