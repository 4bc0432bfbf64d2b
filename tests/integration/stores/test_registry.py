"""Models that are published to a real registry: as images, whole or not at all, and each blob once."""

import hashlib
import io
import json
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
from support.stores.registry_login import login, require_password, require_tokens
from support.stores.registry_proxy import Fault, RegistryProxy, serve_proxy
from support.stores.registry_server import RegistryServer, serve_registry
from support.stores.sealed_model import FILES, SealedModel, make_model, start_publish

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.publishing.published_model import describe
from finetune_trainer.runtime.artifacts import seal
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    Interrupted,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.oci import store as registry_module
from finetune_trainer.stores.oci.image import FILE_NAME, MANIFEST_TYPE, MOST_LAYERS
from finetune_trainer.stores.oci.store import RegistrySource, RegistryTarget
from finetune_trainer.stores.port import Publication
from testcluster.images import oci
from testcluster.linux_namespaces.certificates import Authority

REPOSITORY = "team/model"
PROCESS_SECONDS = 60


def publish(host: str, model: SealedModel, tag: str = "") -> Publication:
    return RegistryTarget(f"oci://{host}/{REPOSITORY}{tag}").publish(
        model.folder, model.digest, model.names
    )


def image(registry: RegistryServer, reference: str) -> dict:
    status, body = registry.get(
        f"/v2/{REPOSITORY}/manifests/{reference}", MANIFEST_TYPE
    )
    assert status == 200
    return json.loads(body)


def unpacked(registry: RegistryServer, reference: str = "latest") -> dict[str, bytes]:
    """Return the files of an image, as a container runtime unpacks its layers."""
    files = {}
    for layer in image(registry, reference)["layers"]:
        content = registry.get(f"/v2/{REPOSITORY}/blobs/{layer['digest']}")[1]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == layer["digest"]
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for entry in archive:
                assert (entry.uid, entry.gid, entry.mode, entry.mtime) == (
                    0,
                    0,
                    0o644,
                    0,
                )
                file = archive.extractfile(entry)
                assert file
                files[entry.name] = file.read()
    return files


def blob_of(registry: RegistryServer, name: str) -> Path:
    layers = image(registry, "latest")["layers"]
    return registry.blob(
        next(
            layer["digest"]
            for layer in layers
            if layer["annotations"][FILE_NAME] == name
        )
    )


def test_published_model_is_an_image_of_its_files(
    registry: RegistryServer, model: SealedModel
):
    published = publish(registry.host, model)
    assert unpacked(registry) == {
        f"models/{name}": content for name, content in model.contents.items()
    }
    digest = published.uri.removeprefix(f"oci://{registry.host}/{REPOSITORY}@")
    assert registry.manifests(REPOSITORY) == [digest]
    assert registry.tags(REPOSITORY) == ["latest", f"sha256-{model.digest[7:19]}"]
    assert image(registry, digest) == image(registry, "latest")
    assert published.sent_bytes == model.size


def test_image_config_lists_the_layers(registry: RegistryServer, model: SealedModel):
    publish(registry.host, model)
    manifest = image(registry, "latest")
    config = json.loads(
        registry.get(f"/v2/{REPOSITORY}/blobs/{manifest['config']['digest']}")[1]
    )
    assert config["rootfs"] == {
        "type": "layers",
        "diff_ids": [layer["digest"] for layer in manifest["layers"]],
    }


def test_second_push_sends_nothing(proxy: RegistryProxy, model: SealedModel):
    first = publish(proxy.host, model)
    writes = proxy.count("PUT") + proxy.count("POST")
    assert publish(proxy.host, model) == Publication(first.uri, 0)
    assert proxy.count("PUT") + proxy.count("POST") == writes


def test_push_from_another_folder_gives_the_same_digest(
    registry: RegistryServer, model: SealedModel, tmp_path: Path
):
    copy = make_model(tmp_path / "elsewhere" / "copy")
    assert publish(registry.host, copy).uri == publish(registry.host, model).uri


def test_second_model_moves_the_tag_and_keeps_the_first(
    registry: RegistryServer, model: SealedModel, tmp_path: Path
):
    first = publish(registry.host, model, ":best")
    second = make_model(tmp_path / "second", seed=1)
    publish(registry.host, second, ":best")
    assert (
        unpacked(registry, "best")["models/config.json"]
        == second.contents["config.json"]
    )
    assert (
        unpacked(registry, first.uri.partition("@")[2])["models/config.json"]
        == model.contents["config.json"]
    )
    assert registry.tags(REPOSITORY) == sorted(
        ["best", *(f"sha256-{m.digest[7:19]}" for m in (model, second))]
    )


def test_killed_push_is_not_visible_and_is_continued(
    registry: RegistryServer, proxy: RegistryProxy, model: SealedModel
):
    digests = {
        layer.name: layer.digest()
        for layer in registry_module._layers(model.folder, model.names)
    }
    lost = digests.pop("model-2.safetensors")
    proxy.fault = lambda method, path: (
        Fault(hangs=True) if method == "PUT" and lost[7:] in path else None
    )
    with start_publish(f"oci://{proxy.host}/{REPOSITORY}", model) as process:
        assert proxy.hanging.wait(PROCESS_SECONDS)
        while not all(registry.blob(digest).exists() for digest in digests.values()):
            time.sleep(0.01)
        process.kill()
    assert (registry.tags(REPOSITORY), registry.manifests(REPOSITORY)) == ([], [])
    assert publish(registry.host, model).sent_bytes == len(
        model.contents["model-2.safetensors"]
    )
    assert publish(registry.host, model).sent_bytes == 0
    assert (
        unpacked(registry)["models/model-1.safetensors"]
        == model.contents["model-1.safetensors"]
    )


def test_push_killed_before_its_tag_needs_only_the_tag(
    registry: RegistryServer, proxy: RegistryProxy, model: SealedModel
):
    proxy.fault = lambda method, path: (
        Fault(hangs=True)
        if method == "PUT"
        and "/manifests/" in path
        and proxy.count("PUT", "/manifests/") == 2
        else None
    )
    with start_publish(f"oci://{proxy.host}/{REPOSITORY}", model) as process:
        assert proxy.hanging.wait(PROCESS_SECONDS)
        process.kill()
    assert registry.tags(REPOSITORY) == []
    published = publish(registry.host, model)
    assert published.sent_bytes == 0
    assert published.uri.endswith(registry.manifests(REPOSITORY)[0])
    assert len(registry.tags(REPOSITORY)) == 2


def test_sigterm_in_an_upload_ends_the_process(
    registry: RegistryServer, proxy: RegistryProxy, model: SealedModel
):
    proxy.fault = lambda method, _: Fault(hangs=True) if method == "PUT" else None
    with start_publish(f"oci://{proxy.host}/{REPOSITORY}", model) as process:
        assert proxy.hanging.wait(PROCESS_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitCode.INTERRUPTED  # the proxy hangs for a minute
    assert registry.tags(REPOSITORY) == []


def test_deferred_stop_ends_an_upload(
    registry: RegistryServer,
    proxy: RegistryProxy,
    model: SealedModel,
    monkeypatch: pytest.MonkeyPatch,
):
    def fault(method: str, _path: str) -> None:
        if method == "POST":
            monkeypatch.setattr(stop, "requested", True)

    proxy.fault = fault
    with pytest.raises(Interrupted):
        publish(proxy.host, model)
    assert registry.manifests(REPOSITORY) == []


def test_two_pushes_at_once_write_one_image(
    registry: RegistryServer, model: SealedModel, tmp_path: Path
):
    copy = make_model(tmp_path / "copy")
    processes = [
        start_publish(f"oci://{registry.host}/{REPOSITORY}", each)
        for each in (model, copy)
    ]
    uris = {
        process.communicate(timeout=PROCESS_SECONDS)[0].split()[0]
        for process in processes
    }
    assert uris == {
        f"oci://{registry.host}/{REPOSITORY}@{registry.manifests(REPOSITORY)[0]}"
    }
    assert len(registry.manifests(REPOSITORY)) == 1
    assert unpacked(registry) == {
        f"models/{name}": content for name, content in model.contents.items()
    }


def test_same_model_with_another_card_is_the_same_image(
    registry: RegistryServer, model: SealedModel, tmp_path: Path
):
    first = publish(registry.host, with_card(model, tmp_path / "first"))
    again = publish(registry.host, with_card(model, tmp_path / "again"), ":stable")
    assert (again.uri, again.sent_bytes) == (first.uri, 0)
    assert image(registry, "stable") == image(registry, "latest")


def with_card(model: SealedModel, folder: Path) -> SealedModel:
    """Return a copy of a model with a model card, which is no part of its digest."""
    shutil.copytree(model.folder, folder)
    (folder / "README.md").write_text(f"the run {folder.name}")
    seal(folder)
    return SealedModel(folder, describe(folder).digest)


def test_truncated_blob_is_named_and_a_lost_one_sent_again(
    registry: RegistryServer, model: SealedModel
):
    publish(registry.host, model)
    blob = blob_of(registry, "model-1.safetensors")
    blob.write_bytes(blob.read_bytes()[:1000])
    registry.stop()
    registry.start()  # it caches sizes
    with pytest.raises(
        ServiceUnavailable,
        match=rf"holds 1000 bytes of model-1\.safetensors.*sha256:{blob.parent.name}",
    ):
        publish(registry.host, model)
    blob.unlink()
    assert publish(registry.host, model).sent_bytes == FILES["model-1.safetensors"]
    assert (
        unpacked(registry)["models/model-1.safetensors"]
        == model.contents["model-1.safetensors"]
    )


def test_image_of_others_is_not_replaced(registry: RegistryServer, model: SealedModel):
    oci.push(registry.host, REPOSITORY, "latest", b"{}", [b"layer"])
    before = image(registry, "latest")
    with pytest.raises(
        ConfigInvalid, match="latest is an image that was not written by a push"
    ):
        publish(registry.host, model)
    assert image(registry, "latest") == before
    publish(registry.host, model, ":other")
    assert "other" in registry.tags(REPOSITORY)


def test_model_of_too_many_files_is_refused(
    registry: RegistryServer, model: SealedModel
):
    for number in range(MOST_LAYERS - len(model.names)):
        (model.folder / f"shard-{number:03}").write_bytes(b"")
    model = SealedModel(model.folder, seal(model.folder))
    with pytest.raises(
        ConfigInvalid, match="501 files and a container runtime mounts at most 500"
    ):
        publish(registry.host, model)
    assert registry.tags(REPOSITORY) == []


def test_file_changed_since_it_was_sealed_is_not_fetched(
    registry: RegistryServer, model: SealedModel, tmp_path: Path
):
    path = model.folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    source = RegistrySource(publish(registry.host, model).uri)
    with pytest.raises(DataInvalid, match=r"model-1\.safetensors has the digest"):
        fetch(source, None, tmp_path / "cache")


@pytest.mark.usefixtures("short_outages")
def test_file_changed_since_the_last_push_is_not_pushed(
    registry: RegistryServer, model: SealedModel, tmp_path: Path
):
    publish(registry.host, model)
    path = model.folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    with serve_registry(tmp_path / "other") as other:
        with pytest.raises(ServiceUnavailable, match="DIGEST_INVALID"):
            publish(other.host, model)
        assert other.tags(REPOSITORY) == []


def test_password_is_needed_and_accepted(
    registry: RegistryServer,
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    require_password(proxy)
    with pytest.raises(CredentialsRejected, match="requires credentials"):
        publish(proxy.host, model)
    monkeypatch.setenv(
        "DOCKER_CONFIG", str(login(tmp_path / "wrong", proxy.host, "wrong"))
    )
    with pytest.raises(
        CredentialsRejected, match="refuses GET: status 401: UNAUTHORIZED"
    ):
        publish(proxy.host, model)
    assert registry.tags(REPOSITORY) == []
    monkeypatch.setenv("DOCKER_CONFIG", str(login(tmp_path / "right", proxy.host)))
    assert publish(proxy.host, model).sent_bytes == model.size
    assert unpacked(registry)["models/a/b.txt"] == model.contents["a/b.txt"]


def test_tokens_are_needed_and_accepted(
    registry: RegistryServer,
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tokens = require_tokens(proxy)
    monkeypatch.setenv(
        "DOCKER_CONFIG", str(login(tmp_path / "wrong", proxy.host, "wrong"))
    )
    with pytest.raises(CredentialsRejected, match="refuses a token: status 401"):
        publish(proxy.host, model)
    monkeypatch.setenv("DOCKER_CONFIG", str(login(tmp_path / "right", proxy.host)))
    assert publish(proxy.host, model).sent_bytes == model.size
    assert tokens.scopes == [
        f"repository:{REPOSITORY}:{actions}" for actions in ("pull", "pull,push")
    ]
    assert unpacked(registry)["models/a/b.txt"] == model.contents["a/b.txt"]


def test_expired_token_is_renewed(
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tokens = require_tokens(proxy)
    monkeypatch.setenv("DOCKER_CONFIG", str(login(tmp_path / "right", proxy.host)))
    target = RegistryTarget(f"oci://{proxy.host}/{REPOSITORY}")
    target.publish(model.folder, model.digest, model.names)
    tokens.expired = {"0", "1"}
    assert target.publish(model.folder, model.digest, model.names).sent_bytes == 0
    assert len(tokens.scopes) == 3


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_authority_of_the_registry_is_configurable(
    model: SealedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setattr("finetune_trainer.stores.oci.credentials.LOOPBACK", frozenset())
    for other in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(other, raising=False)
    authority = Authority(tmp_path / "ca")
    with serve_registry(
        tmp_path / "registry",
        authority.issue("registry", "test", serves=("127.0.0.1",)),
    ) as registry:
        with pytest.raises(
            ConfigInvalid, match=r"CERTIFICATE_VERIFY_FAILED.*set SSL_CERT_FILE"
        ):
            publish(registry.host, model)
        monkeypatch.setenv(variable, str(authority.pair.certificate))
        assert publish(registry.host, model).sent_bytes == model.size


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (403, CredentialsRejected),
        (404, SourceNotFound),
        (400, ConfigInvalid),
        (405, ConfigInvalid),
    ],
)
def test_refused_upload_ends_with_its_error(
    registry: RegistryServer,
    proxy: RegistryProxy,
    model: SealedModel,
    status: int,
    error: type[Exception],
):
    body = json.dumps(
        {"errors": [{"code": "THE_CODE", "message": "the message"}]}
    ).encode()
    proxy.fault = lambda method, _: (
        Fault(status, body=body) if method == "POST" else None
    )
    with pytest.raises(
        error, match=rf"oci://{proxy.host}.*{status}: THE_CODE the message"
    ):
        publish(proxy.host, model)
    assert registry.tags(REPOSITORY) == []


@pytest.mark.usefixtures("short_outages")
def test_registry_that_is_gone_is_unavailable(
    registry: RegistryServer, model: SealedModel
):
    registry.stop()
    started = time.monotonic()
    with pytest.raises(
        ServiceUnavailable, match=rf"oci://{registry.host}/.*Connection refused"
    ):
        publish(registry.host, model)
    assert time.monotonic() - started < 10


def test_short_outage_is_survived(registry: RegistryServer, model: SealedModel):
    with serve_proxy(registry.host) as proxy:
        proxy.fault = lambda method, _: (
            Fault(503)
            if method in {"PUT", "HEAD"} and proxy.count(method) in {1, 2, 9}
            else None
        )
        assert publish(proxy.host, model).sent_bytes == model.size
    assert unpacked(registry)["models/config.json"] == model.contents["config.json"]


def test_busy_registry_is_asked_again_when_it_says(
    proxy: RegistryProxy, model: SealedModel
):
    moments = []

    def fault(method: str, _path: str) -> Fault | None:
        moments.append(time.monotonic())
        return Fault(429, {"Retry-After": "2"}) if len(moments) == 1 else None

    proxy.fault = fault
    publish(proxy.host, model)
    assert moments[1] - moments[0] >= 2
