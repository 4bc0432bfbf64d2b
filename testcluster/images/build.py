"""Build the images of the operator and the trainer, and print their sizes."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from testcluster.errors import UsageError
from testcluster.images import base_image, image_builders
from testcluster.images.image_builders import Build, Engine

ROOT = Path(__file__).parents[2]
IMAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "operator": ("operator", {}),
    "trainer-cpu": ("trainer", {"DEVICE": "cpu"}),
    "trainer": ("trainer", {}),
}
"""Image -> the last part of its Dockerfile's name, and the build's own arguments."""
DEFAULT = ("operator", "trainer-cpu")
"""What a cluster without GPUs needs."""


def main() -> int:
    """Build the requested images. Return the exit code: 0 done, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="python -m testcluster.images", description=__doc__
    )
    parser.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help=f"one of {', '.join(IMAGES)} (default: {' and '.join(DEFAULT)})",
    )
    parser.add_argument("--tag", default="dev")
    parser.add_argument("--engine", choices=sorted(image_builders.ENGINES))
    parser.add_argument(
        "--base",
        help="base image (default: the public one; if it cannot be pulled, one created by debootstrap)",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.images) - IMAGES.keys()
    if unknown:
        parser.error(
            f"unknown image {', '.join(sorted(unknown))}; write {', '.join(IMAGES)}"
        )
    try:
        engine = image_builders.choose(arguments.engine)
        base_image = arguments.base or _choose_base(engine)
        for name in arguments.images or DEFAULT:
            build(engine, name, arguments.tag, base_image)
    except UsageError as problem:
        print(f"images: {problem}", file=sys.stderr)
        return 2
    return 0


def build_all() -> None:
    """Build the default images with the tag that tests use. Raises UsageError."""
    engine = image_builders.choose()
    base_image = _choose_base(engine)
    for name in DEFAULT:
        build(engine, name, "dev", base_image)


def build(engine: Engine, name: str, tag: str, base_image: str) -> None:
    """Build an image and print its size. Raises UsageError with the end of the engine's output when it fails."""
    started = time.monotonic()
    image = f"finetune-{name}:{tag}"
    print(f"building {image} with {engine.name} on {base_image} …", flush=True)
    command = engine.build_command(
        describe(
            name, image, base_image, _uv_cache() if engine.name == "buildah" else None
        )
    )
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError(
            f"{engine.name} could not build {image}:\n{done.stdout[-3000:]}"
        )
    print(
        f"{image}: {engine.size(image) / 1e6:.0f} MB, {time.monotonic() - started:.0f} s"
    )


def describe(name: str, image: str, base_image: str, uv_cache: Path | None) -> Build:
    """Return the inputs of an image's build."""
    dockerfile, own = IMAGES[name]
    arguments = {
        **own,
        "BASE_IMAGE": base_image,
        "VERSION": _version(),
        "REVISION": _git("rev-parse", "HEAD") or "unknown",
    }
    arguments |= {"SOURCE": os.environ.get("FINETUNE_SOURCE", "")}
    mounts = {file: f"{file}:ro" for file in _host_files(base_image) if file.exists()}
    if uv_cache:
        mounts[uv_cache] = "/var/cache/uv:rw"
        arguments["UV_CACHE_DIR"] = "/var/cache/uv"
    # Not the time of the last commit: a new timestamp would invalidate every cached layer.
    timestamp = int(
        _git("log", "-1", "--format=%ct", "--", "pyproject.toml", "hashes.txt") or 0
    )
    return Build(
        image, ROOT / f"Dockerfile.{dockerfile}", ROOT, arguments, mounts, timestamp
    )


def _host_files(base: str) -> list[Path]:
    """Return certificates and settings of pip and apt of the host: to download packages, and never part of the image.

    The public base image has apt sources of its own. The host has the sources of the image that debootstrap made.
    """
    apt = (
        Path("/etc/apt/sources.list"),
        Path("/etc/apt/sources.list.d"),
        Path("/etc/apt/apt.conf.d"),
    )
    return [
        Path("/etc/ssl/certs"),
        Path("/etc/pip.conf"),
        *(apt if base == base_image.NAME else ()),
    ]


def _uv_cache() -> Path | None:
    folder = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    return folder if folder.is_dir() else None


def _choose_base(engine: Engine) -> str:
    """Return the public base image if it can be pulled, else one created by debootstrap.

    A created one is used without another pull, because a failing pull is slow in some networks.
    """
    public = re.search(
        r"^ARG BASE_IMAGE=(\S+)",
        (ROOT / "Dockerfile.operator").read_text(),
        re.MULTILINE,
    )
    if not public:
        raise UsageError(
            "Dockerfile.operator has no ARG BASE_IMAGE with a default; add one"
        )
    if engine.digest(public[1]) or engine.digest(f"docker.io/library/{public[1]}"):
        return public[1]
    if engine.digest(base_image.NAME):
        return base_image.NAME
    try:
        pulled = subprocess.run(
            [engine.name, "pull", "--quiet", f"docker.io/library/{public[1]}"],
            capture_output=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return base_image.provide(engine, print)
    return public[1] if pulled.returncode == 0 else base_image.provide(engine, print)


def _version() -> str:
    match = re.search(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    return match[1] if match else "0.0.0"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
