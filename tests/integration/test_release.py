"""A release from a tagged checkout: chart and bill of materials are real, and a program stands in for docker."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.programs import missing
from support.stores.registry_server import RegistryServer, serve_registry

from e2e.pipelines.chart import CHART, helm
from testcluster import binaries

ROOT = Path(__file__).parents[2]
RELEASE = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "release.py")))
FILES = (
    "pyproject.toml",
    "constraints.txt",
    "hashes.txt",
    "CHANGELOG.md",
    "Dockerfile.operator",
    "Dockerfile.trainer",
)
DIGESTS = {
    name: f"sha256:{letter * 64}"
    for name, letter in zip(("operator", "trainer", "trainer-cpu"), "abc", strict=True)
}
DOCKER = f"""#!{sys.executable}
import json, pathlib, sys
options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
name = options["tag"].rpartition("finetune-")[2].partition(":")[0]
with open(CALLS, "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
pathlib.Path(options["metadata-file"]).write_text(json.dumps({{"containerimage.digest": {DIGESTS!r}[name]}}))
"""
VERSION = "1.2.3"


def git(checkout: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(
        ["git", "-C", checkout, *identity, *arguments],
        check=True,
        stdout=subprocess.PIPE,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose HEAD is tagged as version 1.2.3."""
    folder = tmp_path / "checkout"
    shutil.copytree(CHART, folder / "charts" / "finetune-operator")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    (folder / ".gitignore").write_text("dist/\n")
    replace(folder / "pyproject.toml", r'^version = ".*"', f'version = "{VERSION}"')
    replace(
        folder / "charts/finetune-operator/Chart.yaml",
        r"^version: .*",
        f"version: {VERSION}",
    )
    replace(
        folder / "charts/finetune-operator/Chart.yaml",
        r"^appVersion: .*",
        f'appVersion: "{VERSION}"',
    )
    replace(
        folder / "CHANGELOG.md",
        r"^## Unreleased",
        f"## {VERSION} (2030-01-31)\n\n- A line.\n\n## 0.0.1\n\n- Old.",
    )
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def replace(file: Path, pattern: str, text: str) -> None:
    file.write_text(
        re.sub(pattern, text, file.read_text(), count=1, flags=re.MULTILINE)
    )


def commit(checkout: Path) -> None:
    """Commit everything and move the tag of the version to it."""
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message=Release")
    git(checkout, "tag", "--force", f"v{VERSION}")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with serve_registry(tmp_path / "registry") as server:
        yield server


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the arguments of each call of docker; its folder is the first of PATH."""
    programs = tmp_path / "programs"
    log = tmp_path / "calls"
    programs.mkdir()
    (programs / "helm").symlink_to(binaries.program("helm"))
    # `offline` writes no bill of materials.
    (programs / "uv").symlink_to(str(shutil.which("false")))
    (programs / "docker").write_text(DOCKER.replace("CALLS", repr(str(log))))
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.environ["PATH"]]))
    return log


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no bill of materials, for which a package is downloaded."""
    monkeypatch.setitem(
        RELEASE.publish.__globals__, "write_bill_of_materials", lambda _release: None
    )


def publish(registry: RegistryServer, checkout: Path) -> str:
    """Publish the checkout, and return the digest of the chart that the notes name."""
    assert RELEASE.main([f"{registry.host}/team", "--plain-http"], checkout) == 0
    notes = (checkout / "dist" / "notes.md").read_text()
    match = re.search(
        rf"oci://{registry.host}/team/charts/finetune-operator@(sha256:\w+)", notes
    )
    assert match
    return match[1]


@pytest.mark.usefixtures("calls", "offline")
def test_chart_pulled_by_its_digest_renders_the_checkout(
    registry: RegistryServer, checkout: Path, tmp_path: Path
):
    chart = f"oci://{registry.host}/team/charts/finetune-operator@{publish(registry, checkout)}"
    helm("pull", chart, "--plain-http", "--untar", f"--untardir={tmp_path}")
    images = {
        "image": "operator",
        "trainer.image": "trainer",
        "trainer.cpuImage": "trainer-cpu",
    }
    digests = {f"{name}.digest": DIGESTS[of] for name, of in images.items()}
    repositories = {
        f"{name}.repository": f"{registry.host}/team/finetune-{of}"
        for name, of in images.items()
    }
    settings = [
        f"--set={name}={value}" for name, value in (repositories | digests).items()
    ]
    pulled = helm(
        "template",
        "finetune-operator",
        str(tmp_path / "finetune-operator"),
        "--namespace=finetune-system",
    )
    expected = helm(
        *(
            "template",
            "finetune-operator",
            str(checkout / "charts" / "finetune-operator"),
        ),
        *("--namespace=finetune-system", *settings),
    )
    assert pulled == expected
    assert (
        f"{registry.host}/team/finetune-operator:{VERSION}@{DIGESTS['operator']}"
        in pulled
    )


@pytest.mark.usefixtures("calls", "offline")
def test_mirror_replaces_the_registry_of_every_image(
    registry: RegistryServer, checkout: Path
):
    publish(registry, checkout)
    archive = str(checkout / "dist" / f"finetune-operator-{VERSION}.tgz")
    mirror = [
        f"--set={name}.registry=mirror.example" for name in ("image", "trainer.image")
    ]
    mirrored = helm("template", "finetune-operator", archive, *mirror)
    assert registry.host not in mirrored
    for name, digest in DIGESTS.items():
        assert f"mirror.example/team/finetune-{name}:{VERSION}@{digest}" in mirrored


@pytest.mark.usefixtures("offline")
def test_images_are_built_for_two_platforms_and_attested(
    registry: RegistryServer, checkout: Path, calls: Path
):
    publish(registry, checkout)
    commands = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [command[:2] for command in commands] == [["buildx", "build"]] * 3
    assert ["--build-arg=DEVICE=cpu" in command for command in commands] == [
        False,
        False,
        True,
    ]
    for command, name in zip(commands, DIGESTS, strict=True):
        expected = {
            "--platform=linux/amd64,linux/arm64",
            "--sbom=true",
            "--provenance=mode=max",
            "--push",
        }
        assert expected | {
            f"--tag={registry.host}/team/finetune-{name}:{VERSION}"
        } <= set(command)
    notes = (checkout / "dist" / "notes.md").read_text()
    assert all(
        f"finetune-{name}:{VERSION}@{digest}" in notes
        for name, digest in DIGESTS.items()
    )
    assert "- A line." in notes
    assert "- Old." not in notes


def test_bill_of_materials_lists_every_tested_package(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("uv", path=path):
        missing("uv is not installed: pip install uv")
    monkeypatch.setenv("PATH", path)
    release = RELEASE.Release("example.org", VERSION, checkout)
    release.dist.mkdir()
    RELEASE.write_bill_of_materials(release)
    [file] = release.dist.glob("*.cdx.json")
    bill = json.loads(file.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {
        f"{component['name']}=={component['version']}"
        for component in bill["components"]
    }
    assert listed == set((ROOT / "constraints.txt").read_text().split())


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("remote", "source"),
    [
        ("https://git.example/team/finetune.git", "https://git.example/team/finetune"),
        ("https://user:token@git.example/finetune", "https://git.example/finetune"),
        ("git@git.example:team/finetune.git", ""),
    ],
)
def test_images_name_the_https_remote_as_their_source(
    registry: RegistryServer, checkout: Path, calls: Path, remote, source
):
    """Without the credentials that a remote may have: a label of an image is public."""
    git(checkout, "remote", "add", "origin", remote)
    publish(registry, checkout)
    for line in calls.read_text().splitlines():
        assert f"--build-arg=SOURCE={source}" in json.loads(line)


def other_version(checkout: Path) -> None:
    replace(
        checkout / "charts/finetune-operator/Chart.yaml",
        r"^appVersion: .*",
        'appVersion: "9.9.9"',
    )
    commit(checkout)


def no_changes(checkout: Path) -> None:
    replace(checkout / "CHANGELOG.md", rf"^## {VERSION}", "## Unreleased")
    commit(checkout)


def changes_of_a_candidate(checkout: Path) -> None:
    replace(checkout / "CHANGELOG.md", rf"^## {VERSION}", f"## {VERSION}-rc1")
    commit(checkout)


def uncommitted(checkout: Path) -> None:
    (checkout / "forgotten").touch()


def untagged(checkout: Path) -> None:
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=Another")


def pinned(checkout: Path) -> None:
    comment = "sha256:…. If you set it, it wins over the tag.\n  digest: "
    replace(
        checkout / "charts/finetune-operator/values.yaml",
        f'{comment}""',
        f'{comment}"sha256:0"',
    )
    commit(checkout)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            other_version,
            r"appVersion in charts/finetune-operator/Chart.yaml is 9.9.9, and pyproject.toml has 1.2.3",
        ),
        (no_changes, "CHANGELOG.md has no section ## 1.2.3: move"),
        (changes_of_a_candidate, "CHANGELOG.md has no section ## 1.2.3: move"),
        (uncommitted, r"(?s)commit or remove them:.*forgotten"),
        (untagged, "HEAD has no tag v1.2.3, but none: git tag -s v1.2.3"),
        (
            pinned,
            "values.yaml has 0 images finetune-operator with an empty registry, tag and digest",
        ),
    ],
)
def test_incomplete_release_is_refused_before_a_push(
    checkout: Path, calls: Path, capsys, change, error
):
    change(checkout)
    assert RELEASE.main(["registry.example/team"], checkout) == 2
    assert re.search(error, capsys.readouterr().err)
    assert not calls.exists()


@pytest.mark.parametrize("program", ["docker", "helm", "uv"])
def test_missing_program_is_named_before_a_push(
    checkout: Path, calls: Path, capsys, monkeypatch, program
):
    programs = calls.parent / "programs"
    (programs / "git").symlink_to(str(shutil.which("git")))
    (programs / program).unlink()
    monkeypatch.setenv("PATH", str(programs))
    assert RELEASE.main(["registry.example/team"], checkout) == 2
    assert f"{program} is not installed" in capsys.readouterr().err
    assert not calls.exists()


@pytest.mark.usefixtures("calls", "offline")
def test_unreachable_registry_is_refused_with_helms_error(
    registry: RegistryServer, checkout: Path, capsys
):
    registry.stop()
    assert RELEASE.main([f"{registry.host}/team", "--plain-http"], checkout) == 2
    assert re.search("helm push failed: .*connection refused", capsys.readouterr().err)
