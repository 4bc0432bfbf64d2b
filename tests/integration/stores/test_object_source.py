import os
import re
import subprocess
import sys
import time

import pytest
from support.stores.models import MIB, contents, names_in

from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.objects.bucket import locate_objects
from finetune_trainer.stores.objects.store import ObjectSource

ROWS = {
    "tickets-1.jsonl": b"one\n",
    "tickets-2.jsonl": b"two\n",
    "notes.txt": b"notes",
    "sub/tickets-3.jsonl": b"3",
}


@pytest.fixture
def put(bucket):
    """Writes an object, as any program would."""

    def write(uri, data):
        key = locate_objects(uri).key
        remote = bucket.find(key)
        assert bucket.replace(key, data, remote.version if remote else None)

    return write


@pytest.fixture
def rows(prefix, put):
    for name, data in ROWS.items():
        put(f"{prefix}/{name}", data)
    return prefix


@pytest.mark.parametrize("slash", ["", "/"])
def test_prefix_names_all_objects_below_it(rows, put, tmp_path, slash):
    put(f"{rows}-other/x", b"x")
    folder, _ = fetch(ObjectSource(rows + slash), None, tmp_path)
    assert contents(folder) == ROWS


def test_pattern_names_objects_of_one_folder(rows, tmp_path):
    folder, _ = fetch(ObjectSource(f"{rows}/tickets-*.jsonl"), None, tmp_path)
    assert contents(folder) == {
        name: ROWS[name] for name in ("tickets-1.jsonl", "tickets-2.jsonl")
    }


def test_key_names_one_object(rows, tmp_path):
    folder, _ = fetch(ObjectSource(f"{rows}/notes.txt"), None, tmp_path)
    assert contents(folder) == {"notes.txt": b"notes"}


def test_empty_object_is_read_and_a_folder_marker_is_not(prefix, put, tmp_path):
    put(f"{prefix}/a/empty", b"")
    put(f"{prefix}/a/full", b"full")
    folder, _ = fetch(ObjectSource(prefix), None, tmp_path)
    assert contents(folder) == {"a/empty": b"", "a/full": b"full"}


def test_pattern_in_a_folder_is_refused(rows):
    with pytest.raises(ConfigInvalid, match="only the last segment"):
        ObjectSource(f"{rows}/*/tickets.jsonl")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "gs://bucket",
        "ftp://bucket/x",
        "nothing",
    ],
)
def test_uri_without_objects_is_refused(server, uri):
    with pytest.raises(ConfigInvalid, match=re.escape(uri)):
        ObjectSource(uri)


def test_pin_stays_until_an_object_changes(rows, put):
    pin = ObjectSource(rows).list_files(None).pin
    assert ObjectSource(rows).list_files(pin).pin == pin
    put(f"{rows}/notes.txt", b"other")
    with pytest.raises(DataInvalid, match=f"have changed: they were {pin}"):
        ObjectSource(rows).list_files(pin)


def test_object_that_changes_after_the_listing_is_refused(rows, put, tmp_path):
    source = ObjectSource(rows)
    files = {file.name: file for file in source.list_files(None).files}
    put(f"{rows}/notes.txt", b"other")
    with pytest.raises(DataInvalid, match=r"notes\.txt is no longer"):
        source.download(files["notes.txt"], tmp_path / "part")


def test_object_that_changes_in_a_continued_part_is_refused(rows, put, tmp_path):
    source = ObjectSource(rows)
    files = {file.name: file for file in source.list_files(None).files}
    (tmp_path / "part").write_bytes(b"no")
    put(f"{rows}/notes.txt", b"other")
    with pytest.raises(DataInvalid, match=r"notes\.txt is no longer"):
        source.download(files["notes.txt"], tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"no"


SLOW_FETCH = """
import sys, time
from pathlib import Path
from finetune_trainer.stores.objects.bucket import locate_objects
from finetune_trainer.stores.objects.open_bucket import open_bucket
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.objects.store import ObjectSource
uri, cache = sys.argv[1:]
class SlowBucket:
    def __init__(self, bucket):
        self.bucket = bucket
    def __getattr__(self, name):
        return getattr(self.bucket, name)
    def read(self, remote, offset=0):
        for chunk in self.bucket.read(remote, offset):
            yield chunk
            time.sleep(0.2)
fetch(ObjectSource(uri, SlowBucket(open_bucket(locate_objects(uri)))), None, Path(cache))
"""


class CountingBucket:
    """A bucket that counts the bytes that are read from it."""

    def __init__(self, bucket):
        self.bucket = bucket
        self.bytes = 0

    def __getattr__(self, name):
        return getattr(self.bucket, name)

    def read(self, remote, offset=0):
        for chunk in self.bucket.read(remote, offset):
            self.bytes += len(chunk)
            yield chunk


def test_killed_download_goes_on_from_its_part(prefix, bucket, put, tmp_path):
    data = os.urandom(80 * MIB)
    put(f"{prefix}/weights", data)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_FETCH, prefix, tmp_path], env=environment
    )
    while not [
        part for part in tmp_path.rglob("*.part") if part.stat().st_size >= 8 * MIB
    ]:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    kept = next(tmp_path.rglob("*.part")).stat().st_size
    counting = CountingBucket(bucket)
    folder, _ = fetch(ObjectSource(prefix, counting), None, tmp_path)
    assert (folder / "weights").read_bytes() == data
    assert counting.bytes == len(data) - kept
    assert not list(tmp_path.rglob("*.part"))


def test_download_goes_on_after_a_broken_connection(rows, bucket, tmp_path):
    class BreakingBucket(CountingBucket):
        def read(self, remote, offset=0):
            for chunk in self.bucket.read(remote, offset):
                yield chunk[:2]
                raise ServiceUnavailable("the connection broke")

    folder, _ = fetch(ObjectSource(rows, BreakingBucket(bucket)), None, tmp_path)
    assert contents(folder) == ROWS


def test_second_fetch_needs_no_server(server, rows, tmp_path, monkeypatch, impatient):
    folder, listing = fetch(ObjectSource(rows), None, tmp_path)
    for name, value in server.gone.items():
        monkeypatch.setenv(name, value)
    assert fetch(ObjectSource(rows), listing.pin, tmp_path) == (folder, listing)
    assert names_in(folder) == sorted(ROWS)


def test_wrong_key_is_rejected(server, rows, monkeypatch):
    if not server.wrong_keys:
        pytest.skip("this server accepts all credentials")
    for wrong in server.wrong_keys:
        for uri in (rows, f"{rows}/notes.txt", f"{rows}/*.jsonl"):
            with monkeypatch.context() as patched:
                for name, value in wrong.items():
                    patched.setenv(name, value)
                with pytest.raises(CredentialsRejected, match="access denied"):
                    ObjectSource(uri).list_files(None)


@pytest.mark.parametrize("suffix", ["", "/", "/x", "/*.parquet"])
def test_nothing_there_is_not_found(prefix, suffix):
    with pytest.raises(SourceNotFound, match=re.escape(prefix)):
        ObjectSource(prefix + suffix).list_files(None)


@pytest.mark.parametrize("name", ["x", "*.parquet"])
def test_missing_bucket_is_not_found(server, name):
    with pytest.raises(SourceNotFound, match="nobucket"):
        ObjectSource(server.uri(name).replace("bucket", "nobucket")).list_files(None)


def test_server_that_is_gone_is_unavailable(server, prefix, monkeypatch, impatient):
    for name, value in server.gone.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ServiceUnavailable, match=prefix):
        ObjectSource(prefix).list_files(None)


def test_invalid_bucket_name_is_a_mistake_in_the_manifest(server):
    if server.scheme != "s3":
        pytest.skip("only versitygw checks the names of buckets")
    with pytest.raises(ConfigInvalid, match="InvalidBucketName"):
        ObjectSource("s3://b/prefix/*").list_files(None)


def test_pin_does_not_depend_on_the_cache_or_order(rows, put, tmp_path):
    first = fetch(ObjectSource(rows), None, tmp_path / "one")[1]
    second = fetch(ObjectSource(rows), first.pin, tmp_path / "two")[1]
    assert first == second
