from pathlib import Path

import pytest
from support.stages import environment_in

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.errors import ConfigInvalid, ServiceUnavailable, SourceNotFound
from finetune_trainer.runtime.sources import fetch_dataset, fetch_model, locate, locate_existing


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = environment_in(tmp_path)
    (tmp_path / "claims" / "data").mkdir()
    return environment


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("pvc://data/rows.jsonl", "claims/data/rows.jsonl"),
        ("pvc://data", "claims/data"),
        ("pvc://data/a/../b", "claims/data/b"),
        ("data/rows.jsonl", "manifest/data/rows.jsonl"),
        ("file://rows.jsonl", "manifest/rows.jsonl"),
    ],
)
def test_uri_resolves_inside_its_claim_or_the_manifest_folder(
    uri: str, path: str, tmp_path: Path, environment: Environment
) -> None:
    assert locate(uri, environment) == tmp_path / path


def test_absolute_file_uri_resolves_to_its_path(environment: Environment) -> None:
    assert locate("file:///data/rows.jsonl", environment) == Path("/data/rows.jsonl")


def test_unmounted_claim_is_reported_with_the_claim_option(environment: Environment) -> None:
    with pytest.raises(SourceNotFound, match=r"claim other is not mounted.*--claim other=FOLDER"):
        locate("pvc://other/rows.jsonl", environment)


def test_path_that_leaves_its_claim_is_rejected(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "claims" / "data" / "link").symlink_to(tmp_path)

    for uri in ("pvc://data/../secret", "pvc://data/link/secret"):
        with pytest.raises(ConfigInvalid, match="leaves the claim data"):
            locate(uri, environment)


def test_relative_path_is_rejected_without_a_manifest_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="use pvc://CLAIM/PATH"):
        locate("rows.jsonl", Environment(workspace=tmp_path))


def test_unsupported_scheme_is_rejected(environment: Environment) -> None:
    with pytest.raises(ConfigInvalid, match="ftp:// cannot be used here"):
        locate("ftp://host/rows.jsonl", environment)


def test_missing_file_is_reported_with_its_resolved_path(tmp_path: Path, environment: Environment) -> None:
    with pytest.raises(SourceNotFound, match=rf"rows\.jsonl: {tmp_path}/manifest/rows\.jsonl does not exist"):
        locate_existing("rows.jsonl", environment)


def test_local_data_set_is_used_in_place(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "manifest" / "rows.jsonl").touch()

    assert fetch_dataset("rows.jsonl", None, environment) == tmp_path / "manifest" / "rows.jsonl"


def test_folder_without_config_json_is_not_a_model(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "manifest" / "model").mkdir()

    with pytest.raises(SourceNotFound, match=r"has no config\.json"):
        fetch_model("model", None, environment)
    (tmp_path / "manifest" / "model" / "config.json").touch()
    assert fetch_model("model", None, environment) == tmp_path / "manifest" / "model"


def test_hub_data_set_uri_must_name_a_file(environment: Environment) -> None:
    with pytest.raises(ConfigInvalid, match="hf://ORG/NAME/PATH"):
        fetch_dataset("hf://organisation/name", None, environment)


def test_unreachable_hub_is_a_temporary_failure(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants  # noqa: PLC0415  only this test needs the hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ServiceUnavailable, match="hf://organisation/name"):
        fetch_dataset("hf://organisation/name/rows.jsonl", "main", environment)
