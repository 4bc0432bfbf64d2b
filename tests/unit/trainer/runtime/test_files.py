"""Durable writes: on file systems that cannot flush a folder, and after killed writers."""

import errno
import os
import stat

import pytest

from finetune_trainer import files
from finetune_trainer.files import (
    remove_temporary_files,
    sync_folder,
    temporary_name,
    write_durably,
)


@pytest.fixture(autouse=True)
def nothing_logged():
    files.log_once.cache_clear()


@pytest.fixture
def folder_fsync_fails(monkeypatch):
    """A function that makes every fsync of a folder fail with an error number."""

    def fail_with(number):
        fsync = os.fsync

        def failing(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing)

    return fail_with


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_folder_flush_unknown_to_the_file_system_is_logged_once(
    tmp_path, folder_fsync_fails, capsys, number
):
    folder_fsync_fails(number)
    for name in ("a", "b"):
        write_durably(tmp_path / name, b"text")
    assert (tmp_path / "b").read_bytes() == b"text"
    assert capsys.readouterr().err.count("this file system cannot flush a folder") == 1


def test_failing_folder_flush_is_an_error(tmp_path, folder_fsync_fails):
    folder_fsync_fails(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write_durably(tmp_path / "a", b"text")


@pytest.mark.parametrize(
    ("number", "tolerated"),
    [(errno.EACCES, True), (errno.EISDIR, True), (errno.ENOENT, False)],
)
def test_folder_that_cannot_be_opened_is_tolerated(
    tmp_path, monkeypatch, number, tolerated
):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    if tolerated:
        sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            sync_folder(tmp_path)


def test_temporary_name_differs_between_two_writers(tmp_path):
    """The pid does not: it is 1 in every pod."""
    assert temporary_name(tmp_path / "a") != temporary_name(tmp_path / "a")


def test_files_of_killed_writers_are_removed(tmp_path):
    for name in (".a.0123abcd", ".a.keep", ".ab.0123abcd", "a"):
        (tmp_path / name).touch()
    remove_temporary_files(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".a.keep",
        ".ab.0123abcd",
        "a",
    ]
