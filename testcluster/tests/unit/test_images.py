"""The Dockerfiles keep their promises, and the commands that build them are what each engine understands."""

import fnmatch
import re
import tarfile
from pathlib import Path

import pytest

from testcluster.errors import UsageError
from testcluster.images import build, engines, packing

ROOT = Path(__file__).parents[3]
DOCKERFILES = [ROOT / "Dockerfile.operator", ROOT / "Dockerfile.trainer"]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.suffix[1:])
def dockerfile(request):
    return request.param.read_text()


def test_any_builder_can_build_it_on_any_base(dockerfile):
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim", dockerfile, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["${BASE_IMAGE}"]
    assert "--mount" not in dockerfile
    assert "syntax=" not in dockerfile


def test_nobody_runs_python_as_the_first_process(dockerfile):
    assert "USER 65532:65532" in dockerfile
    assert re.search(r'^ENTRYPOINT \["python", "-m", "finetune_\w+"\]$', dockerfile, re.MULTILINE)


def test_a_change_of_code_does_not_install_anything_anew(dockerfile):
    installs, code = dockerfile.index("uv pip install"), dockerfile.index("COPY trainer/")
    assert installs < code


def test_versions_are_the_pinned_ones(dockerfile):
    assert "--constraint /tmp/src/constraints.txt" in dockerfile


def test_what_is_copied_is_there_and_is_sent_to_the_engine(dockerfile):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, pattern) for pattern in sent)


def test_the_operators_image_is_told_to_install_no_trainer():
    assert "--extra operator" in DOCKERFILES[0].read_text()
    assert "--extra trainer" not in DOCKERFILES[0].read_text()


def test_every_engine_is_given_the_same_arguments():
    recipe = build.recipe("operator", "finetune-operator:dev", "base:1", uv_cache=None)
    for engine in engines.ENGINES.values():
        command = engine.build(recipe)
        assert f"--file={ROOT / 'Dockerfile.operator'}" in command
        assert "--build-arg=BASE_IMAGE=base:1" in command
        assert "--tag=finetune-operator:dev" in command
        assert command[-1] == str(ROOT)


def test_what_the_host_trusts_is_seen_while_building_only():
    recipe = build.recipe("operator", "finetune-operator:dev", "base:1", uv_cache=None)
    assert all(there.endswith(":ro") for there in recipe.mounts.values())


def test_without_an_engine_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="apt install buildah"):
        engines.choose()
    with pytest.raises(UsageError, match="no docker can be used"):
        engines.choose("docker")


def test_an_image_that_nobody_knows_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="make images"):
        engines.export("nobody/knows:1", tmp_path)
    with pytest.raises(UsageError, match="no archive"):
        engines.export(str(tmp_path / "missing.tar"), tmp_path)


def test_an_archive_is_named_by_what_is_in_it(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"one")
    first = packing.archive(tmp_path, "localhost/box:1", {"bin/program": program}, ["/bin/program"])
    again = packing.archive(tmp_path, "localhost/box:1", {"bin/program": program}, ["/bin/program"])
    program.write_bytes(b"two")
    other = packing.archive(tmp_path, "localhost/box:1", {"bin/program": program}, ["/bin/program"])
    assert first == again
    assert first != other
    with tarfile.open(first) as files:
        assert sorted(files.getnames()) == ["config.json", "layer.tar", "manifest.json"]
