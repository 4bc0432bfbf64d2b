"""Folders that appear atomically, written and read by several processes at the same time."""

import errno
import multiprocessing
import threading
import time
from contextlib import nullcontext

import pytest

from finetune_trainer import files
from finetune_trainer.publishing import published_model
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.artifacts import (
    CorruptArtifact,
    atomic_folder,
    is_present,
    seal,
    verify,
)
from finetune_trainer.runtime.errors import ServiceUnavailable, SourceNotFound
from finetune_trainer.runtime.locks import try_lock
from finetune_trainer.serving.verify import verify_model


@pytest.fixture(autouse=True)
def nothing_logged():
    files.log_once.cache_clear()


def write(folder, text, **options):
    with atomic_folder(folder, **options) as temporary:
        (temporary / "text").write_text(text)
        seal(temporary, {"stage": "push"})


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def other_process(tmp_path):
    """A process that is writing the same folder. Its pid tells nothing: in a pod it would be this process's pid."""
    context = multiprocessing.get_context("fork")
    writing = context.Event()

    def hold():
        with atomic_folder(tmp_path / "a", shared=True) as temporary:
            (temporary / "text").write_text("of the other")
            writing.set()
            time.sleep(60)

    process = context.Process(target=hold)
    process.start()
    assert writing.wait(60)
    yield process
    process.kill()
    process.join()


def test_folder_of_a_live_process_is_kept_until_it_is_killed(tmp_path, other_process):
    (theirs,) = (path for path in tmp_path.glob(".a.*") if path.is_dir())
    write(tmp_path / "a", "first", shared=True)
    assert (theirs / "text").read_text() == "of the other"
    other_process.kill()
    other_process.join()
    write(tmp_path / "a", "second", shared=True)
    assert names_in(tmp_path) == [".a.lock", "a"]
    assert (tmp_path / "a" / "text").read_text() == "second"


def test_without_locks_nothing_of_others_is_removed(
    tmp_path, other_process, monkeypatch, capsys
):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    before = names_in(tmp_path)
    monkeypatch.setattr("fcntl.flock", unsupported)
    for text in ("first", "second"):
        write(tmp_path / "a", text)
    assert names_in(tmp_path) == [*before, "a"]
    verify(tmp_path / "a")
    assert capsys.readouterr().err.count("this file system has no locks") == 1


def test_lock_file_without_a_folder_is_removed(tmp_path):
    (tmp_path / ".a.0123abcd.lock").touch()
    write(tmp_path / "a", "text")
    assert names_in(tmp_path) == ["a"]


@pytest.fixture
def no_exchange(monkeypatch):
    """Simulate NFS, which cannot exchange two names."""
    monkeypatch.setattr(artifacts, "exchange", lambda *_: False)


@pytest.mark.usefixtures("no_exchange")
def test_replacement_without_exchange_is_whole_and_logged_once(tmp_path, capsys):
    for text in ("first", "second", "third"):
        write(tmp_path / "a", text, shared=True)
    verify(tmp_path / "a")
    assert (tmp_path / "a" / "text").read_text() == "third"
    assert names_in(tmp_path) == [".a.lock", "a"]
    assert capsys.readouterr().err.count("cannot exchange two names") == 1


@pytest.mark.parametrize("shared", [True, False])
def test_kill_between_two_renames_is_completed(tmp_path, shared):
    write(tmp_path / "a", "old")
    (tmp_path / "a").rename(tmp_path / ".a.old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "a", shared=shared):
        raise KeyboardInterrupt
    assert (tmp_path / "a" / "text").read_text() == "old"
    assert not (tmp_path / ".a.old").exists()


def test_second_kill_between_two_renames_does_not_block(tmp_path, monkeypatch):
    """The other process was killed while this one was writing."""
    monkeypatch.setattr(artifacts, "exchange", lambda *_: False)
    write(tmp_path / "a", "older")
    with atomic_folder(tmp_path / "a", shared=True) as temporary:
        (tmp_path / "a").rename(tmp_path / ".a.old")
        write(tmp_path / "b", "theirs")
        (tmp_path / "b").rename(tmp_path / "a")
        (temporary / "text").write_text("mine")
    assert (tmp_path / "a" / "text").read_text() == "mine"
    assert names_in(tmp_path) == [".a.lock", "a"]


def test_reader_waits_for_the_second_rename(tmp_path):
    write(tmp_path / "a", "old")
    (tmp_path / "a").rename(tmp_path / ".a.old")
    timer = threading.Timer(0.2, lambda: (tmp_path / ".a.old").rename(tmp_path / "a"))
    timer.start()
    assert is_present(tmp_path / "a")
    timer.join()
    assert not is_present(tmp_path / "b")


def test_missing_model_is_retried_if_its_replacement_was_killed(tmp_path, monkeypatch):
    """Not SourceNotFound, which is permanent: the next push completes the replacement."""
    monkeypatch.setattr(artifacts, "REPLACEMENT_POLL_SECONDS", 0)
    with pytest.raises(SourceNotFound):
        verify_model(tmp_path / "a", None)
    write(tmp_path / "a", "old")
    (tmp_path / "a").rename(tmp_path / ".a.old")
    with pytest.raises(ServiceUnavailable, match="may have been killed"):
        verify_model(tmp_path / "a", None)


def test_model_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """A reader of the old manifest finds the new files: that is no corruption."""
    write(tmp_path / "a", "old")
    verified = []

    def replaced_meanwhile(folder):
        verified.append(folder)
        if len(verified) == 1:
            write(folder, "new")
            raise CorruptArtifact("text does not match the digest in its manifest")
        return verify(folder)

    monkeypatch.setattr(published_model, "verify", replaced_meanwhile)
    assert (
        verify_model(tmp_path / "a", None)
        == published_model.describe(tmp_path / "a").digest
    )
    assert len(verified) == 2


def test_corrupt_model_that_nothing_replaces_is_refused(tmp_path):
    write(tmp_path / "a", "old")
    (tmp_path / "a" / "text").write_text("bad")
    with pytest.raises(SourceNotFound, match="the pushed model is corrupt"):
        verify_model(tmp_path / "a", None)


def test_seal_ignores_the_manifest_of_a_killed_process(tmp_path):
    (tmp_path / "text").write_text("text")
    (tmp_path / ".manifest.json.0123abcd").write_text("half")
    seal(tmp_path)
    verify(tmp_path)
    assert names_in(tmp_path) == ["manifest.json", "text"]


def test_name_whose_lock_another_process_took_is_not_used(tmp_path, monkeypatch):
    names = []

    def taken_once(path, **options):
        names.append(path)
        if len(names) == 1:
            return None
        return try_lock(path, **options)

    monkeypatch.setattr(artifacts, "try_lock", taken_once)
    with artifacts.atomic_folder(tmp_path / "model") as temporary:
        assert names[1] == temporary.with_name(f"{temporary.name}.lock") != names[0]
        assert (
            try_lock(names[1]) is None
        )  # this process holds the lock of the folder that it writes


@pytest.mark.parametrize(
    ("name", "is_refused"), [(f"sha256-{64 * '0'}", True), ("custom", False)]
)
def test_unsealed_model_is_served_from_a_custom_push_only(tmp_path, name, is_refused):
    model = tmp_path / name
    model.mkdir()
    (model / "config.json").write_text("{}")
    with (
        pytest.raises(SourceNotFound, match=r"has no manifest\.json")
        if is_refused
        else nullcontext()
    ):
        assert verify_model(model, f"sha256:{64 * '0'}") is None
