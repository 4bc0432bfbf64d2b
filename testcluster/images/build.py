"""Build our images, and say how large they are."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from testcluster.errors import UsageError
from testcluster.images import base, engines
from testcluster.images.engines import Build, Engine

ROOT = Path(__file__).parents[2]
IMAGES = ("operator", "trainer")


def main() -> int:
    """Build what was asked for; 0 done, 2 refused."""
    parser = argparse.ArgumentParser(prog="python -m testcluster.images", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)} (default: both)")
    parser.add_argument("--tag", default="dev")
    parser.add_argument("--engine", choices=sorted(engines.ENGINES))
    parser.add_argument("--base", help="the base image (default: the public one, else one made by debootstrap)")
    arguments = parser.parse_args()
    if unknown := set(arguments.images) - set(IMAGES):
        parser.error(f"there is no image {', '.join(sorted(unknown))}; there are {', '.join(IMAGES)}")
    try:
        engine = engines.choose(arguments.engine)
        below = arguments.base or _base(engine)
        for name in arguments.images or IMAGES:
            build(engine, name, arguments.tag, below)
    except UsageError as problem:
        print(f"images: {problem}", file=sys.stderr)
        return 2
    return 0


def build_all() -> None:
    """Build both as they are named in tests. Raises Refused when that cannot be done."""
    engine = engines.choose()
    below = _base(engine)
    for name in IMAGES:
        build(engine, name, "dev", below)


def build(engine: Engine, name: str, tag: str, below: str) -> None:
    """Build one image. Raises Refused when the engine fails; its own words have been printed by then."""
    begun = time.monotonic()
    image = f"finetune-{name}:{tag}"
    print(f"building {image} with {engine.name} on {below} …", flush=True)
    command = engine.build(recipe(name, image, below, _cache_of_uv() if engine.name == "buildah" else None))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{engine.name} could not build {image}:\n{done.stdout[-3000:]}")
    print(f"{image}: {engine.size(image) / 1e6:.0f} MB, {time.monotonic() - begun:.0f} s")


def recipe(name: str, image: str, below: str, uv_cache: Path | None) -> Build:
    """Say what an image is made of."""
    arguments = {"BASE_IMAGE": below, "VERSION": _version(), "REVISION": _git("rev-parse", "HEAD") or "unknown"}
    arguments |= {"SOURCE": os.environ.get("FINETUNE_SOURCE", "")}
    mounts = {file: f"{file}:ro" for file in _trust() if file.exists()}
    if uv_cache:
        mounts[uv_cache] = "/var/cache/uv:rw"
        arguments["UV_CACHE_DIR"] = "/var/cache/uv"
    # Not of the last commit: a new time for old layers would build them all anew.
    born = int(_git("log", "-1", "--format=%ct", "--", "pyproject.toml", "constraints.txt") or 0)
    return Build(image, ROOT / f"Dockerfile.{name}", ROOT, arguments, mounts, born)


def _trust() -> list[Path]:
    """Name what this host trusts and how its pip is set up: needed to fetch packages, and never in the image."""
    return [Path("/etc/ssl/certs"), Path("/etc/pip.conf")]


def _cache_of_uv() -> Path | None:
    known = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    return known if known.is_dir() else None


def _base(engine: Engine) -> str:
    """Take the public base where it can be had; ask for it once, as a pull that fails is slow in some places."""
    public = re.search(r"^ARG BASE_IMAGE=(\S+)", (ROOT / "Dockerfile.operator").read_text(), re.MULTILINE)
    if not public:
        raise UsageError("Dockerfile.operator names no ARG BASE_IMAGE")
    if engine.identity(public[1]) or engine.identity(f"docker.io/library/{public[1]}"):
        return public[1]
    if engine.identity(base.NAME):
        return base.NAME
    try:
        pulled = subprocess.run(
            [engine.name, "pull", "--quiet", f"docker.io/library/{public[1]}"],
            capture_output=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return base.provide(engine, print)
    return public[1] if pulled.returncode == 0 else base.provide(engine, print)


def _version() -> str:
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found else "0.0.0"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
