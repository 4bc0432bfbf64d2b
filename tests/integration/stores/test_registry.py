"""Models that are published to a real registry: as images, whole or not at all, and each blob once."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.stores.registry_images import REPOSITORY, image, publish, unpacked
from support.stores.registry_proxy import Fault, RegistryProxy
from support.stores.registry_server import RegistryServer, serve_registry
from support.stores.sealed_model import FILES, SealedModel, make_model, start_publish

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.publishing.published_model import describe
from finetune_trainer.runtime.artifacts import seal
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    Interrupted,
    ServiceUnavailable,
)
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.oci import store as registry_module
from finetune_trainer.stores.oci.image import FILE_NAME, MOST_LAYERS
from finetune_trainer.stores.oci.store import RegistrySource
from finetune_trainer.stores.port import Publication
from testcluster.images import oci

PROCESS_SECONDS = 60


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
    assert registry.tags(REPOSITORY) == []
    assert registry.manifests(REPOSITORY) == []
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
        start_publish(f"oci://{registry.host}/{REPOSITORY}", published)
        for published in (model, copy)
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
    assert again.uri == first.uri
    assert again.sent_bytes == 0
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
