import os
import signal
import socket
import subprocess
import sys
from itertools import islice

import pytest
from support.stores.models import contents
from support.stores.web import Site, serve

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.hub.source import _receive
from finetune_trainer.stores.objects import bucket
from finetune_trainer.stores.objects.store import ObjectSource, ObjectTarget
from finetune_trainer.stores.oci import client as registry_client
from finetune_trainer.stores.oci.client import RegistryClient
from finetune_trainer.stores.oci.image import parse_name

ROWS = b"row\n" * 1000
SECRET = "5e5516"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 1.0)


@pytest.fixture
def site():
    with serve(
        Site({"rows.jsonl": ROWS, "a%20b.jsonl": ROWS, "rows?download=true": ROWS})
    ) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("rows.jsonl", "rows.jsonl"),
        ("a%20b.jsonl", "a b.jsonl"),
        ("rows?download=true", "rows"),
    ],
)
@pytest.mark.parametrize("etag", ['"1"', 'W/"1"', None])
def test_file_of_a_web_server_is_fetched(site, tmp_path, path, name, etag):
    site.etag = etag
    folder, listing = fetch(ObjectSource(f"{site.url}/{path}"), None, tmp_path)
    assert contents(folder) == {name: ROWS}
    assert listing.files[0].size == len(ROWS)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_part_is_continued_with_and_without_ranges(site, tmp_path, has_ranges):
    site.has_ranges = has_ranges
    source = ObjectSource(f"{site.url}/rows.jsonl")
    (file,) = source.list_files(None).files
    (tmp_path / "part").write_bytes(ROWS[:3000])
    source.download(file, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == ROWS
    assert ("GET", "bytes=3000-") in site.requests


@pytest.mark.parametrize("checks_conditions", [True, False])
@pytest.mark.parametrize(("before", "after"), [('"1"', '"2"'), ('W/"1"', 'W/"2"')])
def test_file_that_changes_after_the_listing_is_refused(
    site, tmp_path, checks_conditions, before, after
):
    site.checks_conditions = checks_conditions
    site.etag = before
    source = ObjectSource(f"{site.url}/rows.jsonl")
    (file,) = source.list_files(None).files
    site.etag = after
    with pytest.raises(DataInvalid, match=r"rows\.jsonl is no longer the version"):
        source.download(file, tmp_path / "part")


def test_file_that_changes_between_two_stages_is_refused(site, tmp_path):
    pin = ObjectSource(f"{site.url}/rows.jsonl").list_files(None).pin
    site.etag = '"2"'
    with pytest.raises(DataInvalid, match="have changed"):
        fetch(ObjectSource(f"{site.url}/rows.jsonl"), pin, tmp_path)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, CredentialsRejected),
        (403, CredentialsRejected),
        (404, SourceNotFound),
        (410, ConfigInvalid),
        (429, ServiceUnavailable),
        (500, ServiceUnavailable),
        (503, ServiceUnavailable),
    ],
)
def test_refusals_are_told_apart(site, status, error):
    site.status = status
    with pytest.raises(error, match=f"{site.url}/rows.jsonl"):
        ObjectSource(f"{site.url}/rows.jsonl").list_files(None)


def test_server_that_is_gone_is_unavailable():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}/rows.jsonl"
        with pytest.raises(ServiceUnavailable, match=uri):
            ObjectSource(uri).list_files(None)


def test_sigterm_ends_a_request_that_is_never_answered(tmp_path):
    """obstore waits in Rust, and Python's handlers of signals do not run meanwhile."""
    code = """
import sys
from pathlib import Path
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.objects.store import ObjectSource
stop.install()
fetch(ObjectSource(sys.argv[1]), None, Path(sys.argv[2]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}/rows.jsonl"
        with subprocess.Popen(
            [sys.executable, "-c", code, uri, tmp_path], env=environment
        ) as process:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                process.send_signal(signal.SIGTERM)
                assert process.wait(10) == ExitCode.INTERRUPTED


def test_signature_in_a_query_is_not_in_an_error(site):
    with pytest.raises(SourceNotFound, match="/none: there is no such object") as error:
        ObjectSource(f"{site.url}/none?signature=secret").list_files(None)
    assert "secret" not in str(error.value)


def test_signature_is_not_in_an_error_of_a_lost_server():
    uri = f"http://user:password@127.0.0.1:9/rows.jsonl?signature={SECRET}"
    with pytest.raises(ServiceUnavailable, match="http://127") as error:
        ObjectSource(uri).list_files(None)
    assert [
        word for word in (SECRET, "user", "password") if word in str(error.value)
    ] == []


def test_signature_is_not_in_the_names_of_a_download(site, tmp_path):
    site.files[f"rows.jsonl?{SECRET}"] = ROWS
    folder, _ = fetch(ObjectSource(f"{site.url}/rows.jsonl?{SECRET}"), None, tmp_path)
    assert SECRET not in str(folder)
    assert not [path for path in tmp_path.rglob("*.json") if SECRET in path.read_text()]


def test_queries_that_choose_a_file_are_told_apart(site, tmp_path):
    site.files |= {
        "get?file=1": b"one",
        "get?file=2": b"two",
    }  # of one size and one ETag
    folders = [
        fetch(ObjectSource(f"{site.url}/get?file={number}"), None, tmp_path)[0]
        for number in (1, 2)
    ]
    assert [contents(folder) for folder in folders] == [
        {"get": b"one"},
        {"get": b"two"},
    ]


@pytest.mark.parametrize("status", [403, 405])
@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("content", [ROWS, b""])
def test_address_that_is_signed_for_get_only_is_fetched(
    site, tmp_path, status, has_ranges, content
):
    site.head_status = status
    site.has_ranges = has_ranges
    site.files["signed?signature=1"] = content
    folder, listing = fetch(
        ObjectSource(f"{site.url}/signed?signature=1"), None, tmp_path
    )
    assert contents(folder) == {"signed": content}
    assert listing.files[0].size == len(content)


@pytest.mark.parametrize("part", [b"", ROWS[:3000]])
@pytest.mark.parametrize("surplus", [1, 20_000_000])
def test_more_bytes_than_listed_are_refused_unwritten(site, tmp_path, part, surplus):
    source = ObjectSource(f"{site.url}/rows.jsonl")
    (file,) = source.list_files(None).files
    (tmp_path / "part").write_bytes(part)
    site.surplus = surplus
    with pytest.raises(
        DataInvalid, match=r"sends more than the 4,000 bytes of rows\.jsonl"
    ):
        source.download(file, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == part


def test_hub_that_sends_more_than_it_lists_is_refused(site, tmp_path, monkeypatch):
    # The library reads the variable when it is imported, and other tests set it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    site.surplus = 20_000_000
    with pytest.raises(DataInvalid, match="the hub sends more than the 4,000 bytes"):
        _receive(f"{site.url}/rows.jsonl", tmp_path / "part", len(ROWS))
    assert (tmp_path / "part").stat().st_size <= len(ROWS)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_endless_blob_is_read_to_its_listed_end(site, monkeypatch, has_ranges):
    monkeypatch.setattr(registry_client, "READ_BYTES", 1000)
    site.has_ranges = has_ranges
    site.surplus = 20_000_000
    site.files["v2/model/blobs/sha256:1"] = ROWS
    uri = f"oci://{site.url.removeprefix('http://')}/model"
    blob = RegistryClient(uri, parse_name(uri)).read_blob("sha256:1", 500, 3500)
    chunks = list(islice(blob, 10))
    assert b"".join(chunks) == ROWS[500:3500]
    assert len(chunks) < 6


def test_web_server_is_no_target(site):
    with pytest.raises(ConfigInvalid, match="use s3://"):
        ObjectTarget(f"{site.url}/models")
