"""Repositories of the hub that may not be read, that are not there, and hubs that do not answer."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores.hub_environment import TOKEN, hub_in, set_token, use_hub
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub

from finetune_trainer.runtime.errors import (
    CredentialsRejected,
    ServiceUnavailable,
    SourceNotFound,
    StageError,
)
from finetune_trainer.stores.hub import client as hub_client
from finetune_trainer.stores.hub.client import HubRepository
from finetune_trainer.stores.hub.source import HubSource
from finetune_trainer.stores.port import RemoteFile

NAME = "people/tiny"
URI = "hf://people/tiny"
WEIGHTS = bytes(range(256)) * 16
MODEL = {"config.json": b"{}", "model.safetensors": WEIGHTS}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in(tmp_path / "hub", monkeypatch) as hub:
        yield hub


def listed(source: HubSource) -> dict[str, RemoteFile]:
    return {file.name: file for file in source.list_files(None).files}


def test_private_repository_is_read_with_a_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repository("ann/secret", MODEL, private=True)
    source = HubSource("hf://ann/secret", "model")
    assert set(MODEL) < set(listed(source))

    hub.add_token("hf_stranger", "eve")
    set_token(monkeypatch, "hf_stranger")
    with pytest.raises(
        SourceNotFound, match=r"404.*no model ann/secret that this HF_TOKEN may see"
    ):
        source.list_files(None)
    set_token(monkeypatch, None)
    with pytest.raises(
        CredentialsRejected,
        match=r"401.*private or does not exist.*set HF_TOKEN in envFrom",
    ):
        source.list_files(None)
    set_token(monkeypatch, "hf_wrong")
    with pytest.raises(
        CredentialsRejected, match=r"401: Invalid credentials.*HF_TOKEN is wrong"
    ):
        source.list_files(None)


@pytest.mark.parametrize(("token", "status"), [(TOKEN, 403), (None, 401)])
def test_gated_repository_is_read_once_its_licence_is_accepted(
    token: str | None,
    status: int,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add_repository(NAME, MODEL, gated=True)
    set_token(monkeypatch, token)
    source = HubSource(URI, "model")
    files = listed(source)
    fix = f"{status}.*accept it at {hub.url}/{NAME}, and set HF_TOKEN in envFrom"
    with pytest.raises(CredentialsRejected, match=fix):
        source.download(files["model.safetensors"], tmp_path / "weights")

    hub.add_token("hf_accepted", "eve", accepted=[NAME])
    set_token(monkeypatch, "hf_accepted")
    source.download(files["model.safetensors"], tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == WEIGHTS


def test_missing_repository_and_revision_are_told_apart(hub: Hub) -> None:
    hub.add_repository(NAME, MODEL)
    with pytest.raises(SourceNotFound, match="there is no model people/other"):
        HubSource("hf://people/other", "model").list_files(None)
    with pytest.raises(SourceNotFound, match="there is no dataset people/tiny"):
        HubSource(URI, "dataset").list_files(None)
    with pytest.raises(SourceNotFound, match="has no such branch, tag or commit"):
        HubSource(URI, "model", "v9").list_files(None)


def test_hub_that_is_down_is_a_temporary_failure(hub: Hub) -> None:
    hub.set_faults(down=True)

    with pytest.raises(ServiceUnavailable, match=f"{URI}: the hub answers 503"):
        HubSource(URI, "model").list_files(None)


def test_hub_that_is_gone_is_a_temporary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub(Hub(tmp_path / "gone")) as gone:
        use_hub(gone, monkeypatch)

    with pytest.raises(
        ServiceUnavailable, match=f"{URI}: {gone.url} cannot be reached"
    ):
        HubSource(URI, "model").list_files(None)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (
            "client error (401 Unauthorized)",
            CredentialsRejected,
            "refuses access: .*set HF_TOKEN",
        ),
        (
            "client error (403 Forbidden)",
            CredentialsRejected,
            "refuses access: .*set HF_TOKEN",
        ),
        (
            "server error (503 Service Unavailable)",
            ServiceUnavailable,
            "transfer with .* failed: .*retry later",
        ),
    ],
)
def test_status_in_an_error_of_xet_decides_its_kind(
    status: str, kind: type[StageError], message: str
) -> None:
    """The client of xet is Hugging Face's own, and has the status in the text of a ConnectionError only."""
    error = ConnectionError(
        f"Network error: Request error: HTTP status {status}, domain: http://cas/v1/xorb-grants"
    )

    with (
        pytest.raises(kind, match=f"{URI}: .*{message}"),
        HubRepository(URI, NAME, "model").errors(),
    ):
        raise error


def test_hub_that_never_answers_is_a_temporary_failure(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)

        with pytest.raises(
            ServiceUnavailable, match=f"{address} does not respond: ReadTimeout"
        ):
            HubSource(URI, "model").list_files(None)
