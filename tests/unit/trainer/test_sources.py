from pathlib import Path

import pytest
from support.stages import environment_in

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.errors import ConfigInvalid, ServiceUnavailable, SourceNotFound
from finetune_trainer.runtime.sources import fetch_dataset, fetch_model, fetch_tokenizer, locate, locate_existing


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
def test_a_uri_names_a_path_below_its_claim_or_beside_the_manifest(
    uri: str, path: str, tmp_path: Path, environment: Environment
) -> None:
    assert locate(uri, environment) == tmp_path / path


def test_an_absolute_file_uri_is_that_path(environment: Environment) -> None:
    assert locate("file:///data/rows.jsonl", environment) == Path("/data/rows.jsonl")


def test_a_claim_that_is_not_mounted_is_named_with_the_option_that_mends_it(environment: Environment) -> None:
    with pytest.raises(SourceNotFound, match=r"claim other is not mounted.*--claim other=FOLDER"):
        locate("pvc://other/rows.jsonl", environment)


def test_no_path_leads_out_of_its_claim(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "claims" / "data" / "link").symlink_to(tmp_path)

    for uri in ("pvc://data/../secret", "pvc://data/link/secret"):
        with pytest.raises(ConfigInvalid, match="leaves the claim data"):
            locate(uri, environment)


def test_paths_beside_the_manifest_exist_on_a_laptop_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="use pvc://CLAIM/PATH"):
        locate("rows.jsonl", Environment(workspace=tmp_path))


def test_a_scheme_that_is_no_folder_is_refused(environment: Environment) -> None:
    with pytest.raises(ConfigInvalid, match="ftp:// cannot be used here"):
        locate("ftp://host/rows.jsonl", environment)


def test_what_is_not_there_is_said_with_the_path_that_was_looked_at(tmp_path: Path, environment: Environment) -> None:
    with pytest.raises(SourceNotFound, match=rf"rows\.jsonl: {tmp_path}/manifest/rows\.jsonl does not exist"):
        locate_existing("rows.jsonl", environment)


def test_a_data_set_on_the_disk_is_used_where_it_lies(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "manifest" / "rows.jsonl").touch()

    assert fetch_dataset("rows.jsonl", None, environment) == tmp_path / "manifest" / "rows.jsonl"


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "manifest" / "model").mkdir()

    for fetch in (fetch_model, fetch_tokenizer):
        with pytest.raises(SourceNotFound, match=r"has no config\.json"):
            fetch("model", None, environment)
    (tmp_path / "manifest" / "model" / "config.json").touch()
    assert fetch_tokenizer("model", None, environment) == tmp_path / "manifest" / "model"


def test_a_data_set_of_the_hub_is_one_file_of_it(environment: Environment) -> None:
    with pytest.raises(ConfigInvalid, match="hf://ORG/NAME/PATH"):
        fetch_dataset("hf://organisation/name", None, environment)


def test_a_hub_that_does_not_answer_may_answer_later(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants  # noqa: PLC0415  only this test speaks of a hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ServiceUnavailable, match="hf://organisation/name"):
        fetch_dataset("hf://organisation/name/rows.jsonl", "main", environment)
