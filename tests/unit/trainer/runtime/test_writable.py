"""A volume that the user of the container may not write: not retried, with its owner and the fix."""

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.trainer.other_user import run_as_other_user
from support.trainer.prepared import prepare_config

from finetune_trainer.contract import ExitCode
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.machine.writable import (
    create_folder,
    describe_error,
    describe_refusal,
)


@pytest.fixture
def workspace():
    """A folder that every user may enter; the folders of pytest are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700)
    shutil.rmtree(folder)


def config():
    return prepare_config(Path("/no/model")).model_dump_json(by_alias=True)


def stage_folder(workspace):
    return workspace / "prepare" / prepare_config(Path("/no/model")).identity


def test_root_owned_volume_is_a_mistake_with_its_fix(workspace):
    workspace.chmod(0o555)
    end = run_as_other_user("prepare", workspace, config())
    assert end.code == ExitCode.CONFIG
    message = end.failure
    owner = workspace.stat()
    assert f"{workspace} is not writable for user" in message
    assert f"it belongs to {owner.st_uid}:{owner.st_gid}, mode 0555" in message
    assert "chown it once" in message


def test_stage_folder_of_another_user_is_a_mistake(workspace):
    stage_folder(workspace).mkdir(parents=True)
    stage_folder(workspace).chmod(0o555)
    end = run_as_other_user("prepare", workspace, config())
    assert end.code == ExitCode.CONFIG
    assert f"{stage_folder(workspace)} is not writable" in end.failure


def test_file_of_another_user_in_the_folder_is_a_mistake(workspace):
    """As an earlier run with another uid leaves it behind."""
    folder = stage_folder(workspace)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (folder / "config.json.tmp").mkdir(mode=0o555)
    error = PermissionError(
        errno.EACCES, "denied", str(folder / "config.json.tmp" / "x")
    )
    if os.geteuid():
        assert "config.json.tmp is not writable" in describe_error(error, workspace)
    else:
        assert describe_error(error, workspace) == ""


def test_folder_of_a_writable_volume_is_created(workspace):
    create_folder(stage_folder(workspace))
    create_folder(stage_folder(workspace))
    assert stage_folder(workspace).is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
def test_read_only_volume_is_a_mistake_with_its_fix(workspace):
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(workspace)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount file systems")
    try:
        assert "its volume is read-only" in describe_refusal(workspace / "prepare")
        with pytest.raises(ConfigInvalid, match="use another claim"):
            create_folder(stage_folder(workspace))
    finally:
        subprocess.run(["umount", str(workspace)], check=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
def test_error_that_may_pass_is_no_mistake(workspace, number):
    workspace.chmod(0o555)
    error = OSError(number, "text", str(workspace / "file"))
    assert describe_error(error, workspace) == ""


def test_error_outside_the_workspace_is_no_mistake(workspace):
    error = PermissionError(errno.EACCES, "denied", "/proc/1/mem")
    assert describe_error(error, workspace) == ""
