"""Publish this checkout as a release: the images, the chart, and a bill of materials. See docs/release.md.

    make release REGISTRY=registry.example/TEAM

Needs docker with buildx and a builder for both architectures, helm, uv, and a login to the registry. Everything that a
release names is written to dist/.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = "charts/finetune-operator"
IMAGES = {
    "operator": ("operator", (), "finetune-operator"),
    "trainer": ("trainer", (), "finetune-trainer"),
    "trainer-cpu": ("trainer", ("DEVICE=cpu",), '""'),
}
"""Image -> the last part of its Dockerfile's name, the build's own arguments, and its repository in values.yaml.

An image with an empty repository lies beside the one with CUDA: the chart takes that one's registry and repository.
"""
PROGRAMS = ("docker", "helm", "uv")
"""What makes a release, besides git."""
PLATFORMS = "linux/amd64,linux/arm64"
CYCLONEDX = "cyclonedx-bom==7.5.0"
"""Runs in an environment of its own: its dependencies do not fit constraints.txt."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Refused(Exception):
    """The release cannot be made: the message says why, and the fix."""


@dataclass(frozen=True)
class Release:
    """A release: its version, its registry and the checkout from which it is made."""

    registry: str
    version: str
    root: Path = ROOT
    plain_http: bool = False

    @property
    def dist(self) -> Path:
        """The folder of the files that the release consists of."""
        return self.root / "dist"

    def image(self, name: str) -> str:
        """Return the repository of an image."""
        return f"{self.registry}/finetune-{name}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Publish the release. Return the exit code: 0 published, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="release.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "registry", help="host and path to push below, as registry.example/TEAM"
    )
    parser.add_argument(
        "--plain-http", action="store_true", help="the registry has no TLS"
    )
    options = parser.parse_args(arguments)
    try:
        release = Release(
            options.registry.strip("/"), checked_version(root), root, options.plain_http
        )
        print(publish(release))
    except Refused as problem:
        print(f"release: {problem}", file=sys.stderr)
        return 2
    return 0


def checked_version(root: Path) -> str:
    """Return the version of the checkout. Raises Refused if two files disagree, or HEAD has another tag."""
    version = _first_match(r'^version = "(.*)"', root / "pyproject.toml")
    for field, pattern in {
        "version": r"^version: (.*)",
        "appVersion": r'^appVersion: "(.*)"',
    }.items():
        other = _first_match(pattern, root / CHART / "Chart.yaml")
        if other != version:
            raise Refused(
                f"{field} in {CHART}/Chart.yaml is {other}, and pyproject.toml has {version}: set both"
            )
    if not changes(root, version):
        raise Refused(
            f"CHANGELOG.md has no section ## {version}: move what is under Unreleased there"
        )
    changed = _run("git", "-C", str(root), "status", "--porcelain")
    if changed:
        raise Refused(
            f"files differ from the commit: commit or remove them:\n{changed}"
        )
    tags = _run("git", "-C", str(root), "tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        raise Refused(
            f"HEAD has no tag v{version}, but {tags or 'none'}: git tag -s v{version}"
        )
    return version


def changes(root: Path, version: str) -> str:
    """Return the section of a version in the changelog, without its heading; empty if there is none."""
    text = (root / "CHANGELOG.md").read_text()
    heading = rf"^## \[?{re.escape(version)}(?![\w.+-])[^\n]*\n"
    section = re.search(rf"{heading}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else ""


def publish(release: Release) -> str:
    """Push images and chart, write the bill of materials and the release notes, and return the notes."""
    check_before_push(release)
    shutil.rmtree(release.dist, ignore_errors=True)
    release.dist.mkdir()
    write_bill_of_materials(
        release
    )  # before the images: it downloads a package, which may fail
    digests = {name: push_image(release, name) for name in IMAGES}
    chart = push_chart(release, digests)
    artifacts = [
        f"{release.image(name)}:{release.version}@{digest}"
        for name, digest in digests.items()
    ]
    artifacts.append(f"oci://{release.registry}/charts/finetune-operator@{chart}")
    lines = [f"- `{artifact}`" for artifact in artifacts]
    notes = "\n".join(
        [
            f"# {release.version}",
            "",
            *lines,
            "",
            changes(release.root, release.version),
            "",
        ]
    )
    (release.dist / "notes.md").write_text(notes)
    return notes


def check_before_push(release: Release) -> None:
    """Raise Refused for what would stop the release when some of its tags are pushed already."""
    for program in PROGRAMS:
        if not shutil.which(program):
            raise Refused(
                f"{program} is not installed: it makes the release (docs/release.md)"
            )
    with_images(release, dict.fromkeys(IMAGES, f"sha256:{'0' * 64}"))


def push_image(release: Release, name: str) -> str:
    """Build an image for both architectures with its attestations, push it, and return the digest of its index."""
    metadata = release.dist / f"{name}.json"
    revision = _run("git", "-C", str(release.root), "rev-parse", "HEAD").strip()
    command = [
        "docker",
        "buildx",
        "build",
        f"--platform={PLATFORMS}",
        "--sbom=true",
        "--provenance=mode=max",
    ]
    dockerfile, own, _ = IMAGES[name]
    arguments = [
        *own,
        f"VERSION={release.version}",
        f"REVISION={revision}",
        f"SOURCE={source(release.root)}",
    ]
    command += [f"--build-arg={argument}" for argument in arguments]
    command += [
        f"--file={release.root}/Dockerfile.{dockerfile}",
        f"--metadata-file={metadata}",
    ]
    _run(
        *command,
        f"--tag={release.image(name)}:{release.version}",
        "--push",
        str(release.root),
    )
    digest = str(json.loads(metadata.read_text()).get("containerimage.digest", ""))
    if not DIGEST.fullmatch(digest):
        raise Refused(
            f"docker buildx pushed {release.image(name)} and reported no digest, but {digest!r}"
        )
    return digest


def source(root: Path) -> str:
    """Return the address of the remote `origin` without its credentials; empty if it is not https."""
    remotes = _run("git", "-C", str(root), "remote", "--verbose")
    origin = re.search(
        r"^origin\thttps://(?:[^@/\s]*@)?(\S+?)(?:\.git)? \(fetch\)",
        remotes,
        re.MULTILINE,
    )
    return f"https://{origin[1]}" if origin else ""


def push_chart(release: Release, digests: dict[str, str]) -> str:
    """Package the chart with the pushed images in its values, push it, and return its digest."""
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(
            shutil.copytree(release.root / CHART, Path(folder) / "finetune-operator")
        )
        (chart / "values.yaml").write_text(with_images(release, digests))
        _run("helm", "package", str(chart), f"--destination={release.dist}")
    archive = release.dist / f"finetune-operator-{release.version}.tgz"
    options = ["--plain-http"] if release.plain_http else []
    done = subprocess.run(
        ["helm", "push", str(archive), f"oci://{release.registry}/charts", *options],  # noqa: S607  as in PATH
        capture_output=True,
        text=True,
        check=False,
    )
    # helm prints the digest to one of the two streams, by its version.
    digest = DIGEST.search(done.stdout + done.stderr)
    if done.returncode or not digest:
        raise Refused(f"helm push failed: {done.stderr.strip()[-2000:]}")
    return digest[0]


def with_images(release: Release, digests: dict[str, str]) -> str:
    """Return the text of the chart's values.yaml with the pushed images. Raises Refused if an image cannot be set."""
    text = (release.root / CHART / "values.yaml").read_text()
    for name, digest in digests.items():
        text = with_image(text, IMAGES[name][2], release.image(name), digest)
    return text


def with_image(values: str, name: str, image: str, digest: str) -> str:
    """Return the text of values.yaml with registry, repository and digest of the image whose repository is `name`.

    Registry and repository are apart, so that a user can replace the registry alone. An empty registry stays empty.
    """
    registry, _, repository = ('""', "", name) if name == '""' else image.partition("/")
    comments = r"(?: *#.*\n)*"
    head = rf'(?P<registry> registry: )""\n(?P<repository>{comments} +repository: ){name}\n'
    tail = rf'(?P<digest>{comments} +tag: ""\n{comments} +digest: )""'
    filled = (
        rf'\g<registry>{registry}\n\g<repository>{repository}\n\g<digest>"{digest}"'
    )
    changed, count = re.subn(head + tail, filled, values)
    if count != 1:
        raise Refused(
            f"values.yaml has {count} images {name} with an empty registry, tag and digest, not one"
        )
    return changed


def write_bill_of_materials(release: Release) -> None:
    """Write the Python packages that were tested, as CycloneDX; BuildKit attests what each image contains."""
    file = release.dist / f"finetune-operator-{release.version}.cdx.json"
    tool = [
        "uv",
        "tool",
        "run",
        "--quiet",
        "--from",
        CYCLONEDX,
        "cyclonedx-py",
        "requirements",
    ]
    options = [
        "--mc-type=application",
        "--output-reproducible",
        "--output-format=JSON",
        f"--output-file={file}",
    ]
    _run(
        *tool,
        str(release.root / "constraints.txt"),
        f"--pyproject={release.root}/pyproject.toml",
        *options,
    )


def _first_match(pattern: str, file: Path) -> str:
    match = re.search(pattern, file.read_text(), re.MULTILINE)
    return match[1] if match else "missing"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refused(
            f"{command[0]} is not installed: it makes the release (docs/release.md)"
        ) from None
    if done.returncode:
        raise Refused(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
