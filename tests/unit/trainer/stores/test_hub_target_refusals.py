"""Pushes that are refused: by the target, by the hub, and by a hub that is down."""

from pathlib import Path

import pytest
from support.stores.hub_environment import (
    set_token,
    use_hub,
)
from support.stores.hub_models import NAME, SMALL, URI, HubModel, make_model, repository
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub

from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    ServiceUnavailable,
)
from finetune_trainer.stores.hub.target import HubTarget


@pytest.fixture
def model(tmp_path: Path) -> HubModel:
    return make_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"pytorch_model.bin": b"weights"}, "pytorch_model.bin"),
        ({"README.md": b"# A model of ours"}, "README.md"),
        ({"manifest.json": b"{}"}, "manifest.json"),
        (
            {
                "manifest.json": b'{"about": {"stage": "train"}, "files": {}, "digest": "d"}'
            },
            "manifest.json",
        ),
    ],
)
def test_push_to_a_repository_with_other_files_is_refused(
    files: dict[str, bytes], named: str, hub: Hub, model: HubModel
) -> None:
    hub.add_repository(NAME, files)
    head = repository(hub).head

    with pytest.raises(
        ConfigInvalid, match=f"{URI}: {named} was not written by a push; move it"
    ):
        model.publish()
    assert repository(hub).head == head
    assert hub.received_bytes() == 0


def test_push_over_a_file_that_no_push_wrote_is_refused(
    hub: Hub, model: HubModel
) -> None:
    model.publish()
    head = repository(hub).push({"notes.txt": b"mine"})

    with pytest.raises(ConfigInvalid, match=r"notes\.txt was not written by a push"):
        model.publish()
    assert repository(hub).head == head


def test_push_to_a_new_repository_with_an_empty_card_works(
    hub: Hub, model: HubModel
) -> None:
    hub.add_repository(NAME, {"README.md": b"---\nlicense: mit\n---\n\n"})

    model.publish()

    assert repository(hub).files() == model.contents()


def test_file_that_differs_from_its_manifest_is_not_committed(
    hub: Hub, model: HubModel
) -> None:
    hub.add_repository(NAME)
    (model.folder / "a.safetensors").write_bytes(SMALL[:-1] + b"x")

    with pytest.raises(
        CorruptArtifact, match=r"a\.safetensors does not match the digest"
    ):
        model.publish()
    assert len(repository(hub).history()) == 1


def test_private_is_the_visibility_of_a_new_repository(
    hub: Hub, model: HubModel
) -> None:
    model.publish(private=True)
    make_model(model.folder.with_name("other"), **{"config.json": b"[]"}).publish(
        private=False
    )

    assert repository(hub).settings["private"]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("hf_wrong", "401.*HF_TOKEN is wrong or missing"),
        (None, "401.*HF_TOKEN is wrong or missing"),
        ("hf_reader", "403.*HF_TOKEN lacks a permission"),
        ("hf_stranger", "403.*HF_TOKEN lacks a permission"),
    ],
)
def test_push_without_the_right_token_is_refused(
    token: str | None,
    message: str,
    hub: Hub,
    model: HubModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is created, and nothing is written to what exists."""
    hub.add_token("hf_reader", "bob", ("people",), write=False)
    hub.add_token("hf_stranger", "eve")
    set_token(monkeypatch, token)

    with pytest.raises(CredentialsRejected, match=message):
        model.publish()
    assert hub.repository(NAME) is None
    hub.add_repository(NAME)
    with pytest.raises(CredentialsRejected, match=message):
        model.publish()
    assert repository(hub).files() == {}


def test_push_whose_upload_breaks_commits_nothing(
    hub: Hub, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repository(NAME)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    hub.set_faults(cut_after=50_000)

    with pytest.raises(ServiceUnavailable, match=f"{URI}: {hub.url} does not respond"):
        model.publish()
    assert len(repository(hub).history()) == 1


def test_card_that_the_hub_refuses_is_reported(hub: Hub, tmp_path: Path) -> None:
    model = make_model(tmp_path / "invalid", **{"README.md": b"---\n[\n---\n"})

    with pytest.raises(ConfigInvalid, match=f"{URI}: the hub answers 400"):
        model.publish()
    assert repository(hub).files() == {}


def test_push_to_a_hub_that_is_down_is_a_temporary_failure(
    hub: Hub, model: HubModel
) -> None:
    hub.set_faults(down=True)

    with pytest.raises(
        ServiceUnavailable,
        match=f"{URI}: the hub answers 503: Service Unavailable; retry later",
    ):
        model.publish()


def test_push_to_a_hub_that_is_gone_is_a_temporary_failure(
    model: HubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub(Hub(tmp_path / "gone")) as gone:
        use_hub(gone, monkeypatch)

    with pytest.raises(
        ServiceUnavailable, match=f"{URI}: {gone.url} cannot be reached.*retry"
    ):
        model.publish()


@pytest.mark.parametrize(
    "uri",
    [
        "hf://people/bot/path",
        "hf://people/bot@main",
        "hf://bot",
        "hf://",
        "hf://a/../b",
    ],
)
def test_push_target_must_be_a_whole_repository(uri: str) -> None:
    with pytest.raises(ConfigInvalid, match="use hf://ORG/NAME"):
        HubTarget(uri)
