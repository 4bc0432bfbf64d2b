"""Models and data sets of the hub: listed once, pinned, downloaded in pieces, and refused."""

import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.stores.hub_environment import hub_in, process_environment
from support.stores.hub_state import Hub, Repository, git_oid

from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    ServiceUnavailable,
)
from finetune_trainer.stores.hub import source as hub_module
from finetune_trainer.stores.hub.source import HubSource
from finetune_trainer.stores.port import RemoteFile

ROOT = Path(__file__).resolve().parents[4]
NAME = "people/tiny"
URI = "hf://people/tiny"
WEIGHTS = bytes(range(256)) * 2048
MODEL = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"[1, 2]",
    "empty.txt": b"",
    "onnx/model.onnx": b"x",
    "onnx/deep/readme.md": b"x",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in(tmp_path / "hub", monkeypatch) as hub:
        yield hub


@pytest.fixture
def model(hub: Hub) -> Repository:
    return hub.add_repository(NAME, MODEL)


def listed(source: HubSource, pin: str | None = None) -> dict[str, RemoteFile]:
    return {file.name: file for file in source.list_files(pin).files}


def test_listing_of_a_model_has_the_commit_and_the_digests(model: Repository) -> None:
    listing = HubSource(URI, "model").list_files(None)

    files = {file.name: file for file in listing.files}
    assert listing.pin == model.head
    assert list(files) == sorted({*MODEL, ".gitattributes"})
    assert {name: files[name].size for name in MODEL} == {
        name: len(content) for name, content in MODEL.items()
    }
    assert files["config.json"] == RemoteFile("config.json", 2, git_oid(b"{}"), None)
    assert files["model.safetensors"].sha256 == hashlib.sha256(WEIGHTS).hexdigest()


def test_all_files_of_a_model_are_downloaded_as_they_are(
    model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    for name, file in listed(source).items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        source.download(file, tmp_path / "out" / name)

    assert {name: (tmp_path / "out" / name).read_bytes() for name in MODEL} == MODEL


def test_folder_of_a_model_is_listed_with_names_below_it(
    model: Repository, tmp_path: Path
) -> None:
    source = HubSource(f"{URI}/onnx", "model")
    files = listed(source)
    source.download(files["model.onnx"], tmp_path / "model.onnx")

    assert set(files) == {"model.onnx", "deep/readme.md"}
    assert (tmp_path / "model.onnx").read_bytes() == b"x"


@pytest.mark.parametrize("uri", [URI, f"{URI}@COMMIT", f"{URI}@v1"])
def test_revision_is_a_tag_or_a_commit(uri: str, model: Repository) -> None:
    first = model.head
    model.set_ref("tags", "v1", first)
    model.push({"config.json": b"[]"})
    source = HubSource(
        uri.replace("COMMIT", first), "model", None if "@" in uri else "v1"
    )

    assert source.list_files(None).pin == first


def test_pin_holds_while_the_branch_moves(model: Repository, tmp_path: Path) -> None:
    pin = HubSource(URI, "model").list_files(None).pin
    model.push({"config.json": b"moved", "model.safetensors": b"moved"})

    source = HubSource(URI, "model")
    for name, file in listed(source, pin).items():
        if name in {"config.json", "model.safetensors"}:
            source.download(file, tmp_path / name)
            assert (tmp_path / name).read_bytes() == MODEL[name]
    assert listed(HubSource(URI, "model"))["config.json"].size == len(b"moved")


def test_branch_that_moves_after_the_listing_changes_nothing(
    model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    files = listed(source)
    model.push({"model.safetensors": b"moved"})
    source.download(files["model.safetensors"], tmp_path / "weights")

    assert (tmp_path / "weights").read_bytes() == WEIGHTS


def test_commit_that_the_hub_no_longer_has_is_reported(
    model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    files = listed(source)
    gone = model.head
    model.set_ref("branches", "main", model.history()[-1])
    (model.folder / "commits" / gone).unlink()

    with pytest.raises(
        DataInvalid, match=f"no longer has the commit {gone}; start again"
    ):
        HubSource(URI, "model").list_files(gone)
    with pytest.raises(DataInvalid, match=f"no longer has config.json of {gone}"):
        source.download(files["config.json"], tmp_path / "config.json")


def test_file_of_another_content_than_listed_is_refused(
    model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    source.list_files(None)

    with pytest.raises(
        DataInvalid, match=r"model\.safetensors is [0-9a-f]{64}, expected d16e"
    ):
        source.download(
            RemoteFile("model.safetensors", 3, "oid", "d16e"), tmp_path / "weights"
        )


@pytest.mark.parametrize("kept", [1, len(WEIGHTS) - 1, len(WEIGHTS)])
def test_download_continues_behind_the_bytes_that_are_there(
    kept: int, hub: Hub, model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    path = tmp_path / "weights"
    path.write_bytes(WEIGHTS[:kept])
    source.download(listed(source)["model.safetensors"], path)

    assert path.read_bytes() == WEIGHTS
    assert hub.sent_bytes() == len(WEIGHTS) - kept


def test_part_that_is_longer_than_the_file_is_replaced(
    model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    path = tmp_path / "weights"
    path.write_bytes(WEIGHTS + b"more")
    source.download(listed(source)["model.safetensors"], path)

    assert path.read_bytes() == WEIGHTS


def test_download_over_a_connection_that_breaks_completes(
    hub: Hub, model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    path = tmp_path / "weights"
    files = listed(source)
    hub.set_faults(cut_after=100_000)
    source.download(files["model.safetensors"], path)

    assert path.read_bytes() == WEIGHTS
    assert hub.sent_bytes() == len(WEIGHTS)
    assert hub.downloads()["model.safetensors"] == 6


def test_download_that_never_brings_a_byte_ends(
    hub: Hub, model: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "WAIT_SECONDS", 0.01)
    source = HubSource(URI, "model")
    files = listed(source)
    hub.set_faults(cut_after=0)

    with pytest.raises(ServiceUnavailable, match=f"{URI}: {hub.url} does not respond"):
        source.download(files["model.safetensors"], tmp_path / "weights")


def test_download_to_a_full_disk_is_a_temporary_failure(model: Repository) -> None:
    source = HubSource(URI, "model")
    file = listed(source)["model.safetensors"]

    with pytest.raises(
        ServiceUnavailable,
        match=r"cannot write: .*No space left on device; free some space",
    ):
        source.download(file, Path("/dev/full"))


def test_killed_download_goes_on_where_it_was(
    hub: Hub, model: Repository, tmp_path: Path
) -> None:
    path = tmp_path / "weights"
    hub.set_faults(bytes_per_second=400_000)
    code = (
        "import sys; from pathlib import Path; from finetune_trainer.stores.hub.source import HubSource\n"
        f"source = HubSource({URI!r}, 'model'); files = source.list_files(None).files\n"
        "[source.download(file, Path(sys.argv[1])) for file in files if file.name == 'model.safetensors']"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, path], env=process_environment(hub), cwd=ROOT
    )
    while not path.exists() or path.stat().st_size < 100_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    kept = path.stat().st_size
    hub.set_faults()
    hub.forget_requests()

    source = HubSource(URI, "model")
    source.download(listed(source)["model.safetensors"], path)

    assert 100_000 <= kept < len(WEIGHTS)
    assert path.read_bytes() == WEIGHTS
    assert hub.sent_bytes() == len(WEIGHTS) - kept


def test_xet_whose_server_is_gone_is_a_temporary_failure(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of xet is Hugging Face's own; what it raises has no class of its own."""
    hub.add_repository(NAME, MODEL, xet=True)
    source = HubSource(URI, "model")
    path = tmp_path / "weights"
    file = listed(source)["model.safetensors"]
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        hub.cas_url = f"http://127.0.0.1:{closed.getsockname()[1]}"

    with pytest.raises(
        ServiceUnavailable,
        match=rf"{URI}: the transfer with {hub.url} failed: .*{hub.cas_url}/",
    ):
        source.download(file, path)
    assert hub.sent_bytes() == 0
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    source.download(file, path)
    assert path.read_bytes() == WEIGHTS


def test_small_file_that_is_spoilt_on_its_way_is_refused(
    hub: Hub, model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    path = tmp_path / "config.json"
    files = listed(source)
    hub.set_faults(spoil=True)

    with pytest.raises(
        ServiceUnavailable,
        match=f"config.json came with the git object id .*, expected {git_oid(b'{}')}",
    ):
        source.download(files["config.json"], path)
    assert not path.exists()


def test_spoilt_part_of_a_small_file_is_not_continued(
    model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"!!!")
    source.download(listed(source)["tokenizer.json"], path)

    assert path.read_bytes() == MODEL["tokenizer.json"]


def test_splits_of_a_data_set_have_different_uris() -> None:
    splits = [
        HubSource(URI, "dataset", config="a", split=split).uri
        for split in ("train", "test", None)
    ]

    assert splits == [
        f"{URI} (config a, split train)",
        f"{URI} (config a, split test)",
        f"{URI} (config a)",
    ]


def test_large_file_that_is_spoilt_differs_from_its_digest(
    hub: Hub, model: Repository, tmp_path: Path
) -> None:
    source = HubSource(URI, "model")
    path = tmp_path / "weights"
    file = listed(source)["model.safetensors"]
    hub.set_faults(spoil=True)
    source.download(file, path)

    assert (
        hashlib.sha256(path.read_bytes()).hexdigest()
        != file.sha256
        == hashlib.sha256(WEIGHTS).hexdigest()
    )


def test_name_that_the_hub_cannot_have_is_refused(hub: Hub) -> None:
    with pytest.raises(
        ConfigInvalid, match=r"the hub has no such name: .*use hf://ORG/NAME"
    ):
        HubSource("hf://people/ti..ny--", "model").list_files(None)
