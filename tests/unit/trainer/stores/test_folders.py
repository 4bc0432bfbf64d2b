import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.stores.models import contents, make_model, names_in

from finetune_trainer.runtime.artifacts import verify
from finetune_trainer.runtime.errors import ConfigInvalid, ServiceUnavailable
from finetune_trainer.stores.folders import FolderTarget


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    return folder, make_model(
        folder, {"config.json": 100, "sub/weights.safetensors": 5000}
    )


@pytest.fixture
def target(tmp_path):
    return FolderTarget("pvc://models/team", tmp_path / "target" / "team")


def publish(target, model):
    folder, digest = model
    return target.publish(folder, digest, names_in(folder))


def folder_of(digest):
    return digest.replace(":", "-")


def test_model_appears_under_its_digest_and_as_latest(target, model):
    folder, digest = model
    publication = publish(target, model)
    assert publication.uri == f"pvc://models/team/{folder_of(digest)}"
    assert publication.sent_bytes == 5100
    latest = target._path / "latest"
    assert str(latest.readlink()) == folder_of(digest)
    verify(latest.resolve())
    assert contents(latest) == contents(folder)


def test_publishing_again_sends_nothing(target, model):
    publish(target, model)
    before = (target._path / "latest").lstat().st_ino
    again = publish(target, model)
    assert again.sent_bytes == 0
    assert (target._path / "latest").lstat().st_ino == before


def test_other_model_under_the_digest_is_replaced(target, model, tmp_path):
    make_model(
        tmp_path / "other", {"config.json": 100, "sub/weights.safetensors": 5000}
    )
    shutil.copytree(tmp_path / "other", target._path / folder_of(model[1]))
    assert publish(target, model).sent_bytes == 5100
    assert contents(target._path / "latest") == contents(model[0])


def test_files_are_hard_links_on_one_file_system(target, model):
    publish(target, model)
    name = "sub/weights.safetensors"
    assert (target._path / "latest" / name).samefile(model[0] / name)


@pytest.mark.parametrize(
    "code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP]
)
def test_files_are_copied_where_links_are_impossible(target, model, monkeypatch, code):
    def refuse(_self, _source):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    publish(target, model)
    assert contents(target._path / "latest") == contents(model[0])
    assert not (target._path / "latest" / "config.json").samefile(
        model[0] / "config.json"
    )


def test_next_model_is_latest_and_the_old_one_stays(target, model, tmp_path):
    publish(target, model)
    second = tmp_path / "second", make_model(tmp_path / "second")
    publish(target, second)
    assert contents(target._path / "latest") == contents(second[0])
    assert contents(target._path / folder_of(model[1])) == contents(model[0])


def test_spoilt_copy_is_mended_by_the_next_push(target, model):
    publish(target, model)
    spoilt = target._path / "latest" / "config.json"
    spoilt.unlink()
    spoilt.write_bytes(b"s" * 100)
    assert publish(target, model).sent_bytes == 5100
    assert contents(target._path / "latest") == contents(model[0])


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "v1/model.safetensors",
        "latest/config.json",
        "sha256-12/config.json",
    ],
)
def test_what_no_push_wrote_is_refused_and_stays(target, model, name):
    (target._path / name).parent.mkdir(parents=True)
    (target._path / name).write_bytes(b"mine")
    with pytest.raises(ConfigInvalid, match=r"no push wrote it|not written by a push"):
        publish(target, model)
    assert contents(target._path) == {name: b"mine"}


def test_file_at_the_path_of_the_target_is_refused(target, model):
    target._path.parent.mkdir()
    target._path.write_bytes(b"mine")
    with pytest.raises(ConfigInvalid, match="is no folder"):
        publish(target, model)
    assert target._path.read_bytes() == b"mine"


def test_new_volume_with_lost_and_found_is_accepted(target, model):
    (target._path / "lost+found").mkdir(parents=True)
    publish(target, model)
    assert contents(target._path / "latest") == contents(model[0])


def test_files_that_were_not_sealed_are_refused(target, model):
    folder, digest = model
    with pytest.raises(ValueError, match="not sealed with exactly"):
        target.publish(folder, digest, ["config.json"])
    assert not target._path.exists()


def test_file_system_without_symbolic_links_is_refused(target, model, monkeypatch):
    def refuse(_self, _target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(ConfigInvalid, match="no links"):
        publish(target, model)


def test_two_writers_at_once_leave_one_intact_model(target, model):
    results = []
    barrier = threading.Barrier(4)

    def run():
        barrier.wait()
        results.append(publish(target, model).uri)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [f"pvc://models/team/{folder_of(model[1])}"] * 4
    verify((target._path / "latest").resolve())
    assert {path.name for path in target._path.iterdir() if path.is_dir()} == {
        folder_of(model[1]),
        "latest",
    }


KILLED = """
import os, pathlib, signal, sys
from finetune_trainer.stores import folders
target, folder, digest, where = sys.argv[1:]
def die(*_arguments, **_options):
    os.kill(os.getpid(), signal.SIGKILL)
if where == "file":
    linked, real = [], folders._link_or_copy
    folders._link_or_copy = lambda *paths: die() if linked else linked.append(real(*paths))
elif where == "rename":
    folders.FolderTarget._switch = die
else:
    pathlib.Path.replace = die
from support.stores.models import names_in
folder = pathlib.Path(folder)
folders.FolderTarget("pvc://models/team", pathlib.Path(target)).publish(folder, digest, names_in(folder))
"""


@pytest.mark.parametrize("where", ["file", "rename", "link"])
def test_kill_leaves_the_old_model_as_latest(target, model, tmp_path, where):
    publish(target, model)
    second = tmp_path / "second", make_model(tmp_path / "second")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, target._path, *second, where]
    assert (
        subprocess.run(command, env=environment, check=False).returncode
        == -signal.SIGKILL
    )
    assert contents(target._path / "latest") == contents(model[0])
    publish(target, second)
    assert contents(target._path / "latest") == contents(second[0])
    left = {
        path.name for path in target._path.iterdir() if not path.name.endswith(".lock")
    }
    assert left == {folder_of(model[1]), folder_of(second[1]), "latest"}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_folder_that_may_not_be_written_is_no_full_disk(
    target, model, monkeypatch, code
):
    def refuse(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        ConfigInvalid, match=r"may not write there: .*; let this user write the folder"
    ) as error:
        publish(target, model)
    assert "free some space" not in str(error.value)


def test_full_disk_is_reported_and_latest_is_unchanged(tmp_path, model):
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("a small file system needs root and mount; run as root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False
    ).returncode:
        pytest.skip(
            "mount -t tmpfs is not permitted here; run on a machine where it is"
        )
    try:
        target = FolderTarget("pvc://models/team", disk / "team")
        publish(target, model)
        second = (
            tmp_path / "second",
            make_model(tmp_path / "second", {"weights": 200_000}),
        )
        with pytest.raises(ServiceUnavailable, match=r"200 kB and .* are free"):
            publish(target, second)
        assert contents(disk / "team" / "latest") == contents(model[0])
    finally:
        subprocess.run(["umount", disk], check=True)
