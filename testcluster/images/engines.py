"""The programs that build and keep images, behind one interface."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import UsageError

ANSWERS_WITHIN = 10
"""Seconds a Docker engine may take to say its version."""


@dataclass(frozen=True)
class Build:
    """What an image is made of."""

    tag: str
    dockerfile: Path
    context: Path
    arguments: Mapping[str, str]
    mounts: Mapping[Path, str]
    """What of this host is seen while it is built, {here: there:ro or there:rw}; it is not in the image."""
    timestamp: int
    """Seconds since 1970 that the image and its files bear, where the engine can do that."""


class Docker:
    """A Docker engine. It cannot mount this host's folders into a build."""

    name = "docker"

    def there(self) -> bool:
        """Tell whether an engine answers; the client alone is of no use."""
        if not shutil.which("docker"):
            return False
        try:
            asked = ["docker", "version", "--format", "{{.Server.Version}}"]
            return subprocess.run(asked, capture_output=True, timeout=ANSWERS_WITHIN, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def build(self, build: Build) -> list[str]:
        """Give the command that builds."""
        arguments = [f"--build-arg={key}={value}" for key, value in build.arguments.items()]
        return ["docker", "build", f"--file={build.dockerfile}", f"--tag={build.tag}", *arguments, str(build.context)]

    def identity(self, image: str) -> str | None:
        """Give the digest of an image that it knows."""
        return _line(["docker", "image", "inspect", "--format", "{{.Id}}", image])

    def size(self, image: str) -> int:
        """Give the bytes of the image's files."""
        return int(_line(["docker", "image", "inspect", "--format", "{{.Size}}", image]) or 0)

    def save(self, image: str, archive: Path) -> list[str]:
        """Give the command that writes the image into an archive."""
        return ["docker", "image", "save", f"--output={archive}", image]


class Buildah:
    """buildah, as root, with chroot instead of containers: it needs no daemon."""

    name = "buildah"

    def there(self) -> bool:
        """Tell whether it can be used."""
        return bool(shutil.which("buildah")) and os.geteuid() == 0

    def build(self, build: Build) -> list[str]:
        """Give the command that builds; what has not changed is taken from earlier builds."""
        arguments = [f"--build-arg={key}={value}" for key, value in build.arguments.items()]
        mounts = [f"--volume={here}:{there}" for here, there in build.mounts.items()]
        how = ["--isolation=chroot", "--layers", f"--timestamp={build.timestamp}", f"--file={build.dockerfile}"]
        return ["buildah", "build", *how, f"--tag={build.tag}", *arguments, *mounts, str(build.context)]

    def identity(self, image: str) -> str | None:
        """Give the digest of an image that it knows."""
        return _line(["buildah", "inspect", "--type=image", "--format", "{{.FromImageID}}", image])

    def size(self, image: str) -> int:
        """Give the bytes of the image's files."""
        listed = _line(["buildah", "images", "--json", image], all_of_it=True)
        return _bytes(json.loads(listed)[0]["size"]) if listed else 0

    def save(self, image: str, archive: Path) -> list[str]:
        """Give the command that writes the image into an archive."""
        return ["buildah", "push", "--disable-compression", image, f"docker-archive:{archive}:{_full(image)}"]


Engine = Docker | Buildah
ENGINES: dict[str, Engine] = {"docker": Docker(), "buildah": Buildah()}


def choose(wanted: str | None = None) -> Engine:
    """Choose the engine asked for, else the first that is there. Raises Refused when none is."""
    for engine in [ENGINES[wanted]] if wanted else ENGINES.values():
        if engine.there():
            return engine
    raise UsageError(
        f"no {wanted or 'Docker engine and no buildah'} can be used here; start Docker, "
        "or run `make cluster-deps` as root (Debian: apt install buildah debootstrap)"
    )


def identity(image: str) -> str:
    """Give the digest of an image. Raises Refused when no engine here knows it."""
    return _known(image)[1]


def place(image: str, folder: Path) -> Path:
    """Name the archive of an image, which its content decides; it need not be there yet."""
    if image.endswith(".tar"):
        if not Path(image).is_file():
            raise UsageError(f"there is no archive {image}")
        if not tarfile.is_tarfile(image):
            raise UsageError(f"{image} is no archive of an image; `docker save` and `buildah push` write one")
        return Path(image).resolve()
    digest = identity(image).removeprefix("sha256:")[:16]
    return folder / f"{image.replace('/', '_').replace(':', '-')}-{digest}.tar"


def export(image: str, folder: Path) -> Path:
    """Write the archive of an image unless it is there; a path to a .tar is given back as it is."""
    archive = place(image, folder)
    if archive.exists():
        return archive
    engine, _ = _known(image)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = archive.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(engine.save(image, fresh), capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"{engine.name} cannot write {image} to {folder}: {done.stderr.strip()[-500:]}")
        fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)
    return archive


def _known(image: str) -> tuple[Engine, str]:
    for engine in ENGINES.values():
        if engine.there() and (known := engine.identity(image)):
            return engine, known
    raise UsageError(
        f"no engine here knows the image {image}; `make images` builds ours, a path to a .tar is taken as it is"
    )


def _full(image: str) -> str:
    """Name the image as Kubernetes does: docker.io/library/ is where names without a host live."""
    return image if "/" in image else f"docker.io/library/{image}"


def _line(command: list[str], *, all_of_it: bool = False) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.strip()
    return (said if all_of_it else said.splitlines()[0]) if done.returncode == 0 and said else None


def _bytes(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[unit.upper()])
