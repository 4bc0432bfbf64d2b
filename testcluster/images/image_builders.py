"""Docker and buildah, the engines that build and store images, behind one interface."""

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

VERSION_TIMEOUT = 10
"""Seconds that a Docker engine may take to report its version."""


@dataclass(frozen=True)
class Build:
    """The inputs of an image's build."""

    tag: str
    dockerfile: Path
    context: Path
    arguments: Mapping[str, str]
    mounts: Mapping[Path, str]
    """Host folders mounted during the build, {host path: "path:ro" or "path:rw"}; they are not part of the image."""
    timestamp: int
    """Timestamp of the image and its files in seconds since 1970, where the engine supports it."""


class Docker:
    """A Docker engine. It cannot mount host folders during a build."""

    name = "docker"

    def is_available(self) -> bool:
        """Check whether an engine answers; the client alone is not enough."""
        if not shutil.which("docker"):
            return False
        try:
            command = ["docker", "version", "--format", "{{.Server.Version}}"]
            return (
                subprocess.run(
                    command, capture_output=True, timeout=VERSION_TIMEOUT, check=False
                ).returncode
                == 0
            )
        except subprocess.TimeoutExpired:
            return False

    def build_command(self, build: Build) -> list[str]:
        """Return the command that builds the image."""
        arguments = [
            f"--build-arg={key}={value}" for key, value in build.arguments.items()
        ]
        return [
            "docker",
            "build",
            f"--file={build.dockerfile}",
            f"--tag={build.tag}",
            *arguments,
            str(build.context),
        ]

    def digest(self, image: str) -> str | None:
        """Return the digest of an image, or None when the engine does not have it."""
        return _line(["docker", "image", "inspect", "--format", "{{.Id}}", image])

    def size(self, image: str) -> int:
        """Return the size of the image's files in bytes."""
        return int(
            _line(["docker", "image", "inspect", "--format", "{{.Size}}", image]) or 0
        )

    def save_command(self, image: str, archive: Path) -> list[str]:
        """Return the command that writes the image to an archive."""
        return ["docker", "image", "save", f"--output={archive}", image]


class Buildah:
    """buildah as root, with chroot isolation instead of containers. It needs no daemon."""

    name = "buildah"

    def is_available(self) -> bool:
        """Check whether buildah is installed and this process is root."""
        return bool(shutil.which("buildah")) and os.geteuid() == 0

    def build_command(self, build: Build) -> list[str]:
        """Return the command that builds the image; unchanged layers are taken from its cache."""
        arguments = [
            f"--build-arg={key}={value}" for key, value in build.arguments.items()
        ]
        mounts = [
            f"--volume={host_path}:{target}"
            for host_path, target in build.mounts.items()
        ]
        options = [
            "--isolation=chroot",
            "--layers",
            f"--timestamp={build.timestamp}",
            f"--file={build.dockerfile}",
        ]
        return [
            "buildah",
            "build",
            *options,
            f"--tag={build.tag}",
            *arguments,
            *mounts,
            str(build.context),
        ]

    def digest(self, image: str) -> str | None:
        """Return the digest of an image, or None when the engine does not have it."""
        return _line(
            [
                "buildah",
                "inspect",
                "--type=image",
                "--format",
                "{{.FromImageID}}",
                image,
            ]
        )

    def size(self, image: str) -> int:
        """Return the size of the image's files in bytes."""
        listed = _line(["buildah", "images", "--json", image], all_lines=True)
        return _bytes(json.loads(listed)[0]["size"]) if listed else 0

    def save_command(self, image: str, archive: Path) -> list[str]:
        """Return the command that writes the image to an archive."""
        return [
            "buildah",
            "push",
            "--disable-compression",
            image,
            f"docker-archive:{archive}:{_qualified_name(image)}",
        ]


Engine = Docker | Buildah
ENGINES: dict[str, Engine] = {"docker": Docker(), "buildah": Buildah()}


def choose(wanted: str | None = None) -> Engine:
    """Return the wanted engine, by default the first that is available. Raises UsageError when there is none."""
    for engine in [ENGINES[wanted]] if wanted else ENGINES.values():
        if engine.is_available():
            return engine
    raise UsageError(
        f"{wanted or 'neither a Docker engine nor buildah'} is {'not ' if wanted else ''}available; start Docker, "
        "or run `make cluster-deps` as root (Debian: apt install buildah debootstrap)"
    )


def digest(image: str) -> str:
    """Return the digest of an image. Raises UsageError when no engine has it."""
    return _find(image)[1]


def archive_path(image: str, folder: Path) -> Path:
    """Return the path of an image's archive, which contains its digest; the file need not exist yet.

    A path to a .tar is checked and returned as it is. Raises UsageError for an unknown image or an invalid archive.
    """
    if image.endswith(".tar"):
        if not Path(image).is_file():
            raise UsageError(f"there is no archive {image}")
        if not tarfile.is_tarfile(image):
            raise UsageError(
                f"{image} is not an image archive; `docker save` and `buildah push` write one"
            )
        return Path(image).resolve()
    short_digest = digest(image).removeprefix("sha256:")[:16]
    return folder / f"{image.replace('/', '_').replace(':', '-')}-{short_digest}.tar"


def export(image: str, folder: Path) -> Path:
    """Write the archive of an image unless it exists, and return its path; a path to a .tar is returned as it is."""
    archive = archive_path(image, folder)
    if archive.exists():
        return archive
    engine, _ = _find(image)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = archive.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(
            engine.save_command(image, fresh),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UsageError(
                f"{engine.name} cannot write {image} to {folder}: {done.stderr.strip()[-500:]}"
            )
        fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)
    return archive


def _find(image: str) -> tuple[Engine, str]:
    for engine in ENGINES.values():
        digest = engine.digest(image) if engine.is_available() else None
        if digest:
            return engine, digest
    raise UsageError(
        f"no engine has the image {image}; `make images` builds the operator's and the trainer's without CUDA, "
        "`make images IMAGES=trainer` the trainer's with CUDA; or name a .tar archive"
    )


def _qualified_name(image: str) -> str:
    """Return the image's name as Kubernetes resolves it: a name without a host is in docker.io/library/."""
    return image if "/" in image else f"docker.io/library/{image}"


def _line(command: list[str], *, all_lines: bool = False) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout.strip()
    if done.returncode != 0 or not output:
        return None
    return output if all_lines else output.splitlines()[0]


def _bytes(text: str) -> int:
    number, unit = text.split()
    return int(
        float(number) * {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[unit.upper()]
    )
