"""Images of models: equal files give equal bytes, and what a stranger wrote cannot name a path elsewhere."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.stores.sealed_model import SealedModel, make_model

from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid, Interrupted
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.oci import image as oci_image
from finetune_trainer.stores.oci.image import (
    ImageName,
    Layer,
    build_image,
    offset_in_layer,
    parse_name,
    read_files,
)
from finetune_trainer.stores.port import RemoteFile

HEX = "0123456789abcdef" * 4


@pytest.fixture
def model(tmp_path: Path) -> SealedModel:
    return make_model(tmp_path / "model")


def layer_of(model: SealedModel, name: str) -> Layer:
    entry = json.loads(model.contents["manifest.json"])["files"][name]
    return Layer(model.folder / name, name, entry["size"], entry["sha256"])


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("oci://host.test/model", ImageName("host.test", "model", None, None)),
        (
            "oci://localhost:5000/team/my-model:v1.0_a",
            ImageName("localhost:5000", "team/my-model", "v1.0_a", None),
        ),
        (
            f"oci://[::1]:5000/m@sha256:{HEX}",
            ImageName("[::1]:5000", "m", None, f"sha256:{HEX}"),
        ),
        (
            f"oci://h/a__b/c.d:1@sha256:{HEX}",
            ImageName("h", "a__b/c.d", "1", f"sha256:{HEX}"),
        ),
    ],
)
def test_name_of_an_image_is_split(uri: str, name: ImageName):
    assert parse_name(uri) == name


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "host",
        "host/",
        "host/Model",
        "host/a//b",
        "host/../b",
        "host/m:",
        "host/m@sha256:1",
        "u:p@host/m",
        "host/m?x",
        "h/m\n",
    ],
)
def test_uri_that_names_no_image_is_refused(rest: str):
    with pytest.raises(
        ConfigInvalid, match="names no image; use oci://HOST/REPOSITORY"
    ):
        parse_name(f"oci://{rest}")


def test_layer_is_a_tar_archive_of_one_file(model: SealedModel):
    for name in model.names:
        layer = layer_of(model, name)
        content = b"".join(layer)
        assert len(layer) == len(content)
        assert layer.digest() == oci_image.digest_of_bytes(content)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            (entry,) = archive
            assert entry.name == f"models/{name}"
            file = archive.extractfile(entry)
            assert file
            assert file.read() == model.contents[name]


@pytest.mark.parametrize(
    ("name", "size"), [("a" * 300, 3), ("größe.txt", 3), ("shard", 9 << 30)]
)
def test_long_names_and_large_sizes_fit_in_the_header(name: str, size: int):
    header = oci_image.archive_header(name, size)
    with tarfile.open(fileobj=io.BytesIO(header + bytes(1024))) as archive:
        entry = archive.next()
    assert entry
    assert entry.name == f"models/{name}"
    assert entry.size == size
    assert oci_image.archive_size(name, size) % 512 == 0


def test_image_of_known_files_has_a_known_digest(model: SealedModel):
    """A change of these bytes makes every model a new image: registries would store all files again."""
    layers = [layer_of(model, name) for name in model.names]
    image = build_image(model.digest, [(layer, layer.digest()) for layer in layers])
    assert (
        image.digest
        == "sha256:ddd519ab7bab17295fa689e11d39539782f128742d219fdde79eadd668516e5f"
    )


def test_file_of_another_size_is_corrupt(model: SealedModel):
    layer = layer_of(model, "config.json")
    for size in (layer.size - 1, layer.size + 1):
        with pytest.raises(
            CorruptArtifact, match=rf"config\.json does not have {size} bytes"
        ):
            replace(layer, size=size).digest()


def test_stop_ends_the_reading_of_a_layer(
    model: SealedModel, monkeypatch: pytest.MonkeyPatch
):
    chunks = iter(layer_of(model, "model-1.safetensors"))
    next(chunks)
    monkeypatch.setattr(stop, "requested", True)
    with pytest.raises(Interrupted):
        next(chunks)


def test_files_of_an_image_are_read_back(model: SealedModel):
    layers = [layer_of(model, name) for name in model.names]
    digests = [layer.digest() for layer in layers]
    manifest = build_image(
        model.digest, list(zip(layers, digests, strict=True))
    ).manifest
    assert oci_image.is_pushed(manifest)
    files = read_files("oci://host/m", manifest)
    assert files == tuple(
        RemoteFile(layer.name, layer.size, digest, layer.sha256)
        for layer, digest in zip(layers, digests, strict=True)
    )
    assert {offset_in_layer(file) for file in files} == {512}


def raw_layer(name: str, **changes: object) -> dict[str, object]:
    annotations = {"org.opencontainers.image.title": name}
    kind = "application/vnd.cncf.model.weight.v1.raw"
    return {
        "mediaType": kind,
        "digest": f"sha256:{HEX}",
        "size": 7,
        "annotations": annotations,
        **changes,
    }


def manifest_of(*layers: object) -> bytes:
    return json.dumps({"schemaVersion": 2, "layers": layers}).encode()


def test_raw_layer_of_a_modelpack_artifact_is_its_file():
    (file,) = read_files("oci://host/m", manifest_of(raw_layer("a/b")))
    assert file == RemoteFile("a/b", 7, f"sha256:{HEX}", HEX)
    assert offset_in_layer(file) == 0


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a//b", ".", "", "a\0"]
)
def test_file_outside_of_the_folder_is_refused(name: str):
    with pytest.raises(DataInvalid, match="holds no model that can be read"):
        read_files("oci://host/m", manifest_of(raw_layer(name)))


@pytest.mark.parametrize(
    "manifest",
    [
        b"<html>",
        b"[]",
        b"{}",
        manifest_of("layer"),
        manifest_of(
            raw_layer("a", mediaType="application/vnd.cncf.model.weight.v1.tar")
        ),
        manifest_of(raw_layer("a", digest="sha512:1")),
        manifest_of(raw_layer("a", size="many")),
        manifest_of(raw_layer("a", annotations=None)),
        manifest_of(
            raw_layer(
                "a",
                mediaType=oci_image.LAYER_TYPE,
                annotations={oci_image.FILE_NAME: "a"},
            )
        ),
    ],
)
def test_manifest_without_a_model_is_refused(manifest: bytes):
    assert not oci_image.is_pushed(manifest)
    with pytest.raises(
        DataInvalid, match="oci://host/m holds no model that can be read"
    ):
        read_files("oci://host/m", manifest)


def test_layer_of_another_layout_is_refused(model: SealedModel):
    layer = layer_of(model, "config.json")
    manifest = json.loads(build_image(model.digest, [(layer, layer.digest())]).manifest)
    manifest["layers"][0]["size"] += 512
    with pytest.raises(DataInvalid, match=r"the layer of config\.json has \d+ bytes"):
        read_files("oci://host/m", json.dumps(manifest).encode())


def test_two_layers_of_one_file_are_refused():
    with pytest.raises(DataInvalid, match="two layers hold a file a;"):
        read_files("oci://host/m", manifest_of(raw_layer("a"), raw_layer("a")))
