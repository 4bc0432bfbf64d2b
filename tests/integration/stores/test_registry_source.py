"""Models that are read from a real registry: pinned, continued where a download ended, and never mixed."""

import hashlib
import json
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support.stores.registry_login import login, require_password
from support.stores.registry_proxy import Fault, RegistryProxy
from support.stores.registry_server import RegistryServer
from support.stores.sealed_model import SealedModel, make_model, start

from finetune_trainer.runtime.artifacts import digest_file
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.oci.image import MANIFEST_TYPE
from finetune_trainer.stores.oci.store import RegistrySource, RegistryTarget
from finetune_trainer.stores.port import Listing, RemoteFile
from testcluster.images import oci

REPOSITORY = "team/model"
WEIGHTS = "model-1.safetensors"
PROCESS_SECONDS = 60

DOWNLOAD = """
import sys
from pathlib import Path
from finetune_trainer.stores.oci.store import RegistrySource
uri, name, path = sys.argv[1:]
source = RegistrySource(uri)
source.download(next(file for file in source.list_files(None).files if file.name == name), Path(path))
"""


@pytest.fixture
def uri(registry: RegistryServer, model: SealedModel) -> str:
    """The URI of the published model."""
    uri = f"oci://{registry.host}/{REPOSITORY}"
    RegistryTarget(uri).publish(model.folder, model.digest, model.names)
    return uri


@pytest.fixture
def source(uri: str, proxy: RegistryProxy) -> RegistrySource:
    """The published model, read through the proxy."""
    return RegistrySource(f"oci://{proxy.host}/{REPOSITORY}")


def file_of(listing: Listing, name: str = WEIGHTS) -> RemoteFile:
    return next(file for file in listing.files if file.name == name)


def read(source: RegistrySource, listing: Listing, folder: Path) -> dict[str, bytes]:
    """Download all files; check them as a caller does."""
    folder.mkdir()
    contents = {}
    for number, file in enumerate(listing.files):
        path = folder / str(number)
        source.download(file, path)
        assert path.stat().st_size == file.size
        assert digest_file(path) == file.sha256
        contents[file.name] = path.read_bytes()
    return contents


def put(
    registry: RegistryServer, path: str, content: bytes, kind: str = MANIFEST_TYPE
) -> None:
    connection = HTTPConnection("127.0.0.1", registry.port, timeout=10)
    connection.request("PUT", path, content, {"Content-Type": kind})
    assert connection.getresponse().status == 201
    connection.close()


def test_published_model_is_read_byte_for_byte(
    source: RegistrySource, model: SealedModel, tmp_path: Path
):
    listing = source.list_files(None)
    assert [file.name for file in listing.files] == sorted(model.contents)
    assert read(source, listing, tmp_path / "copy") == model.contents


def test_moved_tag_does_not_move_the_pin(
    source: RegistrySource, uri: str, model: SealedModel, tmp_path: Path
):
    first = source.list_files(None)
    second = make_model(tmp_path / "second", seed=1)
    published = RegistryTarget(uri).publish(second.folder, second.digest, second.names)
    assert source.list_files(first.pin) == first
    assert read(source, first, tmp_path / "first") == model.contents
    latest = source.list_files(None)
    assert published.uri == f"{uri}@{latest.pin}"
    assert read(source, latest, tmp_path / "latest") == second.contents


def test_uri_of_a_digest_and_of_a_tag_name_one_image(uri: str, model: SealedModel):
    listing = RegistrySource(uri).list_files(None)
    assert RegistrySource(f"{uri}@{listing.pin}").list_files(None) == listing
    assert (
        RegistrySource(f"{uri}:sha256-{model.digest[7:19]}").list_files(None) == listing
    )


def test_pin_that_is_gone_is_invalid_data(source: RegistrySource, model: SealedModel):
    pin = f"sha256:{'0' * 64}"
    with pytest.raises(DataInvalid, match=rf"no longer has the image {pin}"):
        source.list_files(pin)


def test_image_or_tag_that_is_missing_is_not_found(uri: str):
    for missing in (f"{uri}@sha256:{'0' * 64}", f"{uri}:other", f"{uri}/other"):
        with pytest.raises(SourceNotFound, match="the registry has no image"):
            RegistrySource(missing).list_files(None)


def test_image_that_has_lost_a_blob_is_refused_by_name(
    source: RegistrySource, proxy: RegistryProxy
):
    [lost] = [file for file in source.list_files(None).files if file.name == WEIGHTS]
    proxy.fault = lambda _, path: Fault(404) if path.endswith(lost.version) else None
    with pytest.raises(
        DataInvalid, match=rf"has 0 bytes of {lost.version} with {re.escape(WEIGHTS)}"
    ):
        source.list_files(None)


def test_manifest_with_another_digest_is_refused(
    source: RegistrySource, proxy: RegistryProxy
):
    pin = source.list_files(None).pin
    proxy.fault = lambda *_: Fault(200, body=b'{"layers": []}')
    with pytest.raises(DataInvalid, match=rf"returns sha256:\w+ as {pin}"):
        source.list_files(pin)


@pytest.mark.parametrize("cut", [0, 100_000, 299_999])
def test_connection_cut_in_a_file_is_continued(
    source: RegistrySource,
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    cut: int,
):
    file = file_of(source.list_files(None))
    blob_requests = []

    def fault(_method: str, path: str) -> Fault | None:
        blob_requests.append(path)
        return Fault(cut_after=cut) if len(blob_requests) == 1 else None

    proxy.fault = fault
    source.download(file, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == model.contents[WEIGHTS]
    assert file.size
    assert proxy.ranges == [
        f"bytes={512 + written}-{512 + file.size - 1}" for written in (0, cut)
    ]


def test_killed_download_is_continued_by_range(
    source: RegistrySource, proxy: RegistryProxy, model: SealedModel, tmp_path: Path
):
    path = tmp_path / "part"
    proxy.fault = lambda method, path: (
        Fault(cut_after=1 << 18, hangs=True)
        if method == "GET" and "/blobs/" in path
        else None
    )
    with start(DOWNLOAD, source.uri, WEIGHTS, str(path)) as process:
        assert proxy.hanging.wait(PROCESS_SECONDS)
        while path.stat().st_size < 1 << 17:
            time.sleep(0.01)
        process.kill()
    proxy.fault = lambda *_: None
    written = path.stat().st_size
    assert written < len(model.contents[WEIGHTS])
    source.download(file_of(source.list_files(None)), path)
    assert path.read_bytes() == model.contents[WEIGHTS]
    assert (
        proxy.ranges[-1]
        == f"bytes={512 + written}-{512 + len(model.contents[WEIGHTS]) - 1}"
    )


def test_registry_that_ignores_ranges_is_read(
    source: RegistrySource, proxy: RegistryProxy, model: SealedModel, tmp_path: Path
):
    proxy.fault = lambda *_: Fault(ignores_range=True)
    path = tmp_path / "part"
    path.write_bytes(model.contents[WEIGHTS][:1000])
    source.download(file_of(source.list_files(None)), path)
    assert path.read_bytes() == model.contents[WEIGHTS]


def test_part_that_is_too_long_is_read_anew(
    source: RegistrySource, model: SealedModel, tmp_path: Path
):
    path = tmp_path / "part"
    path.write_bytes(bytes(len(model.contents[WEIGHTS]) + 1))
    source.download(file_of(source.list_files(None)), path)
    assert path.read_bytes() == model.contents[WEIGHTS]


def test_spoilt_blob_differs_from_its_listed_digest(
    source: RegistrySource, registry: RegistryServer, tmp_path: Path
):
    file = file_of(source.list_files(None))
    blob = registry.blob(file.version)
    content = bytearray(blob.read_bytes())
    content[1000] ^= 1
    blob.write_bytes(content)
    source.download(file, tmp_path / "part")
    assert digest_file(tmp_path / "part") != file.sha256


@pytest.mark.parametrize("left", [0, 100, 1000])
def test_truncated_blob_is_refused_by_name(
    source: RegistrySource, registry: RegistryServer, tmp_path: Path, left: int
):
    file = file_of(source.list_files(None))
    blob = registry.blob(file.version)
    blob.write_bytes(blob.read_bytes()[:left])
    registry.stop()
    registry.start()  # it caches sizes
    with pytest.raises(
        DataInvalid,
        match=rf"{WEIGHTS} has 300,000 bytes and the registry has {max(0, left - 512)} of",
    ):
        source.download(file, tmp_path / "part")


def test_deleted_blob_is_refused_by_name(
    source: RegistrySource, registry: RegistryServer, tmp_path: Path
):
    file = file_of(source.list_files(None))
    registry.blob(file.version).unlink()
    with pytest.raises(
        DataInvalid, match=rf"{WEIGHTS} has 300,000 bytes and the registry has 0 of"
    ):
        source.download(file, tmp_path / "part")


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files: a larger write fails with EFBIG, like a write to a full disk with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_temporary_and_loses_nothing(
    source: RegistrySource, model: SealedModel, tmp_path: Path
):
    path = tmp_path / "part"
    file = file_of(source.list_files(None))
    with (
        full_disk(100_000),
        pytest.raises(
            ServiceUnavailable, match=rf"cannot write {path}: .*free some space"
        ),
    ):
        source.download(file, path)
    assert path.read_bytes() == model.contents[WEIGHTS][:100_000]
    source.download(file, path)
    assert path.read_bytes() == model.contents[WEIGHTS]


@pytest.mark.parametrize(
    ("status", "error"), [(403, CredentialsRejected), (404, SourceNotFound)]
)
def test_refused_manifest_ends_with_its_error(
    source: RegistrySource, proxy: RegistryProxy, status: int, error: type[Exception]
):
    proxy.fault = lambda *_: Fault(status)
    with pytest.raises(error, match=source.uri):
        source.list_files(None)


def test_password_is_needed_and_accepted(
    source: RegistrySource,
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    require_password(proxy)
    monkeypatch.setenv(
        "DOCKER_CONFIG", str(login(tmp_path / "wrong", proxy.host, "wrong"))
    )
    with pytest.raises(CredentialsRejected, match="401"):
        source.list_files(None)
    monkeypatch.setenv("DOCKER_CONFIG", str(login(tmp_path / "right", proxy.host)))
    assert read(source, source.list_files(None), tmp_path / "copy") == model.contents


@pytest.mark.usefixtures("short_outages")
def test_registry_that_goes_away_is_unavailable(
    source: RegistrySource, registry: RegistryServer, tmp_path: Path
):
    file = file_of(source.list_files(None))
    registry.stop()
    direct = RegistrySource(f"oci://{registry.host}/{REPOSITORY}")
    started = time.monotonic()
    for call in (
        lambda: direct.list_files(None),
        lambda: direct.download(file, tmp_path / "part"),
    ):
        with pytest.raises(ServiceUnavailable, match="Connection refused"):
            call()
    assert time.monotonic() - started < 20


def test_modelpack_artifact_with_raw_layers_is_read(
    registry: RegistryServer, tmp_path: Path
):
    layers = []
    for name, content in {
        "config.json": b"{}",
        "weights/model.safetensors": b"weights" * 1000,
    }.items():
        oci.push(registry.host, REPOSITORY, "blob", content, [])
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        kind = "application/vnd.cncf.model.weight.v1.raw"
        annotations = {"org.cncf.model.filepath": name}
        layers.append(
            {
                "mediaType": kind,
                "digest": digest,
                "size": len(content),
                "annotations": annotations,
            }
        )
    config = {
        "mediaType": "application/vnd.cncf.model.config.v1+json",
        "digest": layers[0]["digest"],
        "size": 2,
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": config,
        "layers": layers,
    }
    put(registry, f"/v2/{REPOSITORY}/manifests/pack", json.dumps(manifest).encode())
    source = RegistrySource(f"oci://{registry.host}/{REPOSITORY}:pack")
    contents = read(source, source.list_files(None), tmp_path / "copy")
    assert contents == {
        "config.json": b"{}",
        "weights/model.safetensors": b"weights" * 1000,
    }


def test_image_that_holds_no_model_is_refused(registry: RegistryServer):
    oci.push(registry.host, REPOSITORY, "latest", b"{}", [b"layer"])
    with pytest.raises(DataInvalid, match="holds no model that can be read"):
        RegistrySource(f"oci://{registry.host}/{REPOSITORY}").list_files(None)


def test_name_of_a_host_without_tls_is_explained(
    uri: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune_trainer.stores.oci.credentials.LOOPBACK", frozenset())
    with pytest.raises(
        ConfigInvalid, match=r"WRONG_VERSION_NUMBER.*FINETUNE_INSECURE_REGISTRIES"
    ):
        RegistrySource(uri).list_files(None)
    monkeypatch.setenv(
        "FINETUNE_INSECURE_REGISTRIES", f"other.test, {uri.split('/')[2]}"
    )
    assert RegistrySource(uri).list_files(None).files
