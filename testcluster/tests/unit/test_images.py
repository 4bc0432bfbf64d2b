"""Properties of the Dockerfiles, the build commands of each engine, and small images."""

import fnmatch
import re
import tarfile
from pathlib import Path

import pytest

from testcluster.errors import UsageError
from testcluster.images import base_image, build, image_builders, image_layers

ROOT = Path(__file__).parents[3]
DOCKERFILES = [ROOT / "Dockerfile.operator", ROOT / "Dockerfile.trainer"]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.suffix[1:])
def dockerfile(request):
    return request.param.read_text()


def test_dockerfile_needs_no_buildkit_and_takes_any_base(dockerfile):
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["${BASE_IMAGE}"]
    assert "--mount" not in dockerfile
    assert "syntax=" not in dockerfile


def test_base_image_is_named_by_version_and_digest():
    bases = {
        base
        for path in DOCKERFILES
        for base in re.findall(r"^ARG BASE_IMAGE=(.*)$", path.read_text(), re.MULTILINE)
    }
    [base] = bases
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)


def test_dockerfiles_are_all_checked_here():
    assert sorted(DOCKERFILES) == sorted(ROOT.glob("Dockerfile*"))


def test_no_file_is_fetched_but_packages_with_hashes(dockerfile):
    """A program of another image, or of an address, would come without a digest."""
    assert not re.search(r"^(ADD|COPY --from)", dockerfile, re.MULTILINE)
    assert not re.search(r"\b(curl|wget|git clone)\b", dockerfile)


def test_builder_has_the_version_and_hashes_of_uv(dockerfile):
    tools = (ROOT / "image-tools.txt").read_text()
    assert re.search(r"^uv==\d+\.\d+\.\d+ \\\n    --hash=sha256:", tools, re.MULTILINE)
    assert "'/^uv==/,/[^\\\\]$/p' /tmp/src/image-tools.txt" in dockerfile
    assert "--require-hashes --requirement /tmp/src/uv.txt" in dockerfile


def test_python_runs_as_nonroot_and_first_process(dockerfile):
    assert "USER 65532:65532" in dockerfile
    assert re.search(
        r'^ENTRYPOINT \["python", "-m", "finetune_\w+"\]$', dockerfile, re.MULTILINE
    )


def test_code_is_copied_after_dependencies(dockerfile):
    installs = dockerfile.index("uv pip install")
    code = dockerfile.index("COPY trainer/")
    assert installs < code


def test_each_downloaded_package_needs_a_known_hash(dockerfile):
    joined = dockerfile.replace("\\\n", " ")
    installs = re.findall(r"(?:uv )?pip install .*?(?= && |; fi)", joined)
    assert len(installs) >= 2
    for install in installs:
        assert "--require-hashes" in install
    assert "--constraint /tmp/src/hashes.txt" in dockerfile


@pytest.mark.parametrize("name", ["hashes.txt", "image-tools.txt"])
def test_hashes_name_packages_and_no_place_of_download(name):
    lines = (ROOT / name).read_text().splitlines()
    package = re.compile(r"[a-z0-9.-]+==[a-z0-9.]+ \\")
    hashed = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert [
        line
        for line in lines
        if not (package.fullmatch(line) or hashed.fullmatch(line))
    ] == []


def test_hashes_are_of_the_tested_versions():
    hashes = (ROOT / "hashes.txt").read_text()
    versions = re.findall(r"^(\S+==\S+)", hashes, re.MULTILINE)
    assert sorted(versions) == sorted(
        (ROOT / "constraints.txt").read_text().lower().split()
    )


def test_copied_files_exist_and_are_in_the_build_context(dockerfile):
    sent = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, pattern) for pattern in sent)


def test_operator_image_does_not_install_the_trainer():
    assert "--extra operator" in DOCKERFILES[0].read_text()
    assert "--extra trainer" not in DOCKERFILES[0].read_text()


def test_every_engine_gets_the_same_arguments():
    inputs = build.describe(
        "operator", "finetune-operator:dev", "base:1", uv_cache=None
    )
    for engine in image_builders.ENGINES.values():
        command = engine.build_command(inputs)
        assert f"--file={ROOT / 'Dockerfile.operator'}" in command
        assert "--build-arg=BASE_IMAGE=base:1" in command
        assert "--tag=finetune-operator:dev" in command
        assert command[-1] == str(ROOT)


def test_images_of_the_trainer_differ_by_an_argument():
    trainer, cpu = (
        build.describe(name, name, "base:1", uv_cache=None)
        for name in ("trainer", "trainer-cpu")
    )
    assert trainer.dockerfile == cpu.dockerfile == ROOT / "Dockerfile.trainer"
    assert dict(cpu.arguments) == {"DEVICE": "cpu", **trainer.arguments}


def test_host_files_are_mounted_read_only():
    inputs = build.describe(
        "operator", "finetune-operator:dev", "base:1", uv_cache=None
    )
    assert all(target.endswith(":ro") for target in inputs.mounts.values())


def test_apt_sources_are_mounted_in_the_hosts_own_base_image():
    public, own = (
        build.describe("trainer", "x", base, None).mounts
        for base in ("python:3.11", base_image.NAME)
    )
    assert {path.parts[:3] for path in own.keys() - public.keys()} == {
        ("/", "etc", "apt")
    }


def test_missing_engine_is_refused_with_the_packages(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="apt install buildah"):
        image_builders.choose()
    with pytest.raises(UsageError, match="docker is not available"):
        image_builders.choose("docker")


def test_unknown_image_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="make images"):
        image_builders.export("unknown/image:1", tmp_path)
    with pytest.raises(UsageError, match="no archive"):
        image_builders.export(str(tmp_path / "missing.tar"), tmp_path)


def test_archive_name_depends_on_its_content(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"one")
    first = image_layers.archive(
        tmp_path, "localhost/box:1", {"bin/program": program}, ["/bin/program"]
    )
    again = image_layers.archive(
        tmp_path, "localhost/box:1", {"bin/program": program}, ["/bin/program"]
    )
    program.write_bytes(b"two")
    other = image_layers.archive(
        tmp_path, "localhost/box:1", {"bin/program": program}, ["/bin/program"]
    )
    assert first == again
    assert first != other
    with tarfile.open(first) as files:
        assert sorted(files.getnames()) == ["config.json", "layer.tar", "manifest.json"]
