import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.stores.models import MIB, MemorySource, contents

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.runtime.errors import (
    DataInvalid,
    Interrupted,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores import concurrent
from finetune_trainer.stores.download import fetch

FILES = {
    "config.json": b"{}",
    "sub/part.bin": b"p" * 1000,
    "model.safetensors": b"w" * 5000,
}


def test_fetched_files_equal_those_of_the_source(tmp_path):
    source = MemorySource(FILES)
    folder, listing = fetch(source, None, tmp_path)
    assert contents(folder) == FILES
    assert [file.name for file in listing.files] == sorted(FILES)
    assert listing.pin == source.list_files(None).pin


def test_complete_copy_needs_no_request(tmp_path):
    source = MemorySource(FILES)
    folder, listing = fetch(source, None, tmp_path)
    source.files = {}
    source.listings = 0
    source.sent = 0
    assert fetch(source, listing.pin, tmp_path) == (folder, listing)
    assert source.listings == 0
    assert source.sent == 0


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*.json"], {"config.json"}),
        (["*"], {"config.json", "model.safetensors"}),
        (["sub/*", "*.json"], {"sub/part.bin", "config.json"}),
        (["**"], set(FILES)),
    ],
)
def test_patterns_select_names_with_as_many_slashes(tmp_path, patterns, expected):
    folder, listing = fetch(MemorySource(FILES), None, tmp_path, patterns)
    assert contents(folder).keys() == expected == {file.name for file in listing.files}


def test_no_matching_file_is_named_with_the_patterns(tmp_path):
    with pytest.raises(
        SourceNotFound, match=r"none of its 3 files matches \*\.parquet"
    ):
        fetch(MemorySource(FILES), None, tmp_path, ["*.parquet"])


def test_unfinished_part_is_continued(tmp_path):
    source = MemorySource({"model": b"w" * 5000}, has_digests=True)

    def fail_half_way(_name, path):
        path.write_bytes(b"w" * 3000)
        raise ServiceUnavailable("gone")

    source.before_write = fail_half_way
    with pytest.raises(ServiceUnavailable):
        fetch(source, None, tmp_path)
    source.before_write = lambda _name, _path: None
    folder, _ = fetch(source, None, tmp_path)
    assert contents(folder) == source.files
    assert source.sent == 2000


@pytest.mark.parametrize("spoilt", [b"x" * 3000, b"x" * 9000])
def test_spoilt_part_is_downloaded_again(tmp_path, spoilt):
    source = MemorySource(FILES, has_digests=True)

    def spoil(name, path):
        if name == "model.safetensors":
            path.write_bytes(spoilt)
            raise ServiceUnavailable("gone")

    source.before_write = spoil
    with pytest.raises(ServiceUnavailable):
        fetch(source, None, tmp_path)
    source.before_write = lambda _name, _path: None
    folder, _ = fetch(source, None, tmp_path)
    assert contents(folder) == FILES


def test_wrong_digest_is_refused_by_name(tmp_path):
    source = MemorySource(FILES, has_digests=True)
    listing = source.list_files(None)
    source.files = FILES | {"config.json": b"[]"}
    source.list_files = lambda pin: listing
    with pytest.raises(
        DataInvalid, match=r"config\.json has the digest sha256:.*, expected sha256:"
    ):
        fetch(source, None, tmp_path)
    assert not list(tmp_path.rglob("config.json*"))


def test_changed_source_is_refused_for_an_old_pin(tmp_path):
    source = MemorySource(FILES)
    pin = source.list_files(None).pin
    source.files = FILES | {"config.json": b"[1]"}
    with pytest.raises(DataInvalid, match="changed from"):
        fetch(source, pin, tmp_path)


def test_cached_file_of_another_size_is_fetched_again(tmp_path):
    source = MemorySource(FILES)
    folder, listing = fetch(source, None, tmp_path)
    (folder / "model.safetensors").write_bytes(b"short")
    source.sent = 0
    fetch(source, listing.pin, tmp_path)
    assert contents(folder) == FILES
    assert source.sent == 5000


@pytest.mark.parametrize(
    "name", ["../escape", "/etc/passwd", "a/../../b", "a//b", "./a", "a\0b"]
)
def test_name_outside_of_the_folder_is_refused(tmp_path, name):
    with pytest.raises(DataInvalid, match="no path below a folder"):
        fetch(MemorySource({name: b"x"}), None, tmp_path / "cache")
    assert not [name for name in contents(tmp_path) if not name.endswith(".lock")]


def test_name_that_is_also_a_folder_is_refused(tmp_path):
    with pytest.raises(DataInvalid, match="both a/b and a/b/c"):
        fetch(MemorySource({"a/b": b"x", "a/b/c": b"y"}), None, tmp_path)


def test_two_callers_share_one_download(tmp_path):
    source = MemorySource(FILES)
    source.before_write = lambda _name, _path: time.sleep(0.2)
    folders = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(fetch(source, None, tmp_path)[0])
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.sent == sum(map(len, FILES.values()))
    assert len(folders) == 3
    assert len(set(folders)) == 1


def test_waiting_goes_on_while_the_other_download_grows(tmp_path, monkeypatch):
    monkeypatch.setattr("finetune_trainer.runtime.locks.LOCK_TIMEOUT_SECONDS", 0.2)
    source = MemorySource({"big": b"b" * 100})

    def grow(_name, path):
        for _ in range(20):
            with path.open("ab") as part:
                part.write(b"b")
            time.sleep(0.05)

    source.before_write = grow
    first = threading.Thread(target=fetch, args=(source, None, tmp_path))
    first.start()
    time.sleep(0.2)
    folder, _ = fetch(source, None, tmp_path)
    first.join()
    assert contents(folder) == {"big": b"b" * 100}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("a small file system needs root and mount; run as root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False
    )
    if mounted.returncode:
        pytest.skip(
            "mount -t tmpfs is not permitted here; run on a machine where it is"
        )
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_is_refused_before_the_download(small_disk):
    source = MemorySource({"model": b"m" * 3 * MIB})
    with pytest.raises(
        ServiceUnavailable,
        match=r"need 3.1 MB more .* and 1.0 MB are free",
    ):
        fetch(source, None, small_disk)
    assert source.sent == 0


def test_disk_that_fills_up_is_reported_with_free_bytes(small_disk):
    source = MemorySource({"model": b"m" * (MIB // 2)})
    source.before_write = lambda _name, _path: (small_disk / "other").write_bytes(
        b"o" * (MIB * 3 // 4)
    )
    with pytest.raises(
        ServiceUnavailable,
        match=r"No space left.*needed 524 kB and .* are free",
    ):
        fetch(source, None, small_disk)
    (small_disk / "other").unlink()
    source.before_write = lambda _name, _path: None
    folder, _ = fetch(source, None, small_disk)
    assert contents(folder) == source.files


def test_stop_signal_in_a_deferred_block_raises_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(concurrent, "WAIT_SECONDS", 0.1)
    source = MemorySource(FILES)
    is_waiting = threading.Event()
    go_on = threading.Event()

    def wait(_name: str, _path: Path) -> None:
        is_waiting.set()
        go_on.wait(10)

    def request_stop() -> None:
        is_waiting.wait(10)
        stop.requested = True

    source.before_write = wait
    threading.Thread(target=request_stop).start()
    try:
        with pytest.raises(Interrupted):
            fetch(source, None, tmp_path)
    finally:
        stop.requested = False
        go_on.set()
    assert not list(tmp_path.rglob("manifest.json"))


BLOCKED = """
import ctypes, pathlib, sys
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.download import fetch
from support.stores.models import MemorySource
stop.install()
source = MemorySource({"a": b"a"})
def block(_name, _path):
    print("blocked", flush=True)
    ctypes.CDLL(None).sleep(60)  # without a chance for Python's signal handlers
source.before_write = block
fetch(source, None, pathlib.Path(sys.argv[1]))
"""


def test_sigterm_ends_a_download_that_blocks_outside_python(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BLOCKED, tmp_path]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"blocked\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == ExitCode.INTERRUPTED


def test_first_error_of_parallel_calls_is_raised():
    def work(number):
        if number == 2:
            raise ServiceUnavailable("number 2")
        return number

    assert concurrent.for_each(lambda number: number * 2, range(9), 4) == [
        number * 2 for number in range(9)
    ]
    with pytest.raises(ServiceUnavailable, match="number 2"):
        concurrent.for_each(work, range(9), 4)
