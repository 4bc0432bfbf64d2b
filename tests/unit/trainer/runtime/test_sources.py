from pathlib import Path

import pytest
from support.trainer.stages import environment_in

from finetune_trainer.contract import DatasetSource, Environment
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.runtime.sources import locate, locate_existing
from finetune_trainer.stores.data_files import fetch_dataset
from finetune_trainer.stores.model_files import fetch_model


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = environment_in(tmp_path)
    (tmp_path / "claims" / "data").mkdir()
    return environment


def paths(uri: str, environment: Environment) -> list[Path]:
    return [
        file.path
        for file in fetch_dataset(
            DatasetSource(uri=uri, revision="main"), environment
        ).files
    ]


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


def test_unmounted_claim_is_reported_with_the_claim_option(
    environment: Environment,
) -> None:
    with pytest.raises(
        SourceNotFound, match=r"claim other is not mounted.*--claim other=FOLDER"
    ):
        locate("pvc://other/rows.jsonl", environment)


def test_path_that_leaves_its_claim_is_rejected(
    tmp_path: Path, environment: Environment
) -> None:
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


def test_missing_file_is_reported_with_its_resolved_path(
    tmp_path: Path, environment: Environment
) -> None:
    with pytest.raises(
        SourceNotFound,
        match=rf"rows\.jsonl: {tmp_path}/manifest/rows\.jsonl does not exist",
    ):
        locate_existing("rows.jsonl", environment)


def test_local_data_set_is_used_in_place(
    tmp_path: Path, environment: Environment
) -> None:
    (tmp_path / "manifest" / "rows.jsonl").touch()

    assert paths("rows.jsonl", environment) == [tmp_path / "manifest" / "rows.jsonl"]


@pytest.fixture
def folder(tmp_path: Path, environment: Environment) -> Path:
    """A claim's folder with files, a hidden file, and a folder of a file's name."""
    folder = tmp_path / "claims" / "data" / "day"
    (folder / "rows-9.jsonl").mkdir(parents=True)
    for name in (
        "rows-10.jsonl",
        "rows-2.jsonl",
        "rows-[1].jsonl",
        "other.csv",
        ".rows-0.jsonl",
    ):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("rows-*.jsonl", ["rows-10.jsonl", "rows-2.jsonl", "rows-[1].jsonl"]),
        ("*.jsonl", ["rows-10.jsonl", "rows-2.jsonl", "rows-[1].jsonl"]),
        ("rows-?.jsonl", ["rows-2.jsonl"]),
        ("rows-[0-9].jsonl", ["rows-2.jsonl"]),
        ("rows-[1].jsonl", ["rows-[1].jsonl"]),
        (".*", [".rows-0.jsonl"]),
    ],
)
def test_pattern_names_its_files_in_order(
    folder: Path, environment: Environment, pattern: str, names: list[str]
) -> None:
    assert paths(f"pvc://data/day/{pattern}", environment) == [
        folder / name for name in names
    ]


def test_pattern_works_for_every_kind_of_path(
    tmp_path: Path, environment: Environment
) -> None:
    file = tmp_path / "manifest" / "rows.jsonl"
    file.touch()

    for uri in ("./*.jsonl", "file://*.jsonl", f"file://{tmp_path}/manifest/*.jsonl"):
        assert paths(uri, environment) == [file], uri


@pytest.mark.usefixtures("folder")
def test_pattern_without_a_match_names_what_there_is(environment: Environment) -> None:
    with pytest.raises(
        SourceNotFound,
        match=r"no file matches \*\.parquet; .*/day holds \.rows-0\.jsonl, other\.csv, ",
    ):
        paths("pvc://data/day/*.parquet", environment)
    with pytest.raises(
        SourceNotFound, match=r"/night cannot be listed: No such file or directory"
    ):
        paths("pvc://data/night/*.jsonl", environment)


def test_file_of_a_pattern_that_leaves_its_claim_is_rejected(
    tmp_path: Path, folder: Path, environment: Environment
) -> None:
    (tmp_path / "secret").touch()
    (folder / "rows-3.jsonl").symlink_to(tmp_path / "secret")

    with pytest.raises(
        ConfigInvalid, match=r"day/rows-3\.jsonl: leaves the claim data"
    ):
        paths("pvc://data/day/rows-*.jsonl", environment)


def test_folder_without_config_json_is_not_a_model(
    tmp_path: Path, environment: Environment
) -> None:
    (tmp_path / "manifest" / "model").mkdir()

    with pytest.raises(SourceNotFound, match=r"has no config\.json"):
        fetch_model("model", environment)
    (tmp_path / "manifest" / "model" / "config.json").touch()
    assert fetch_model("model", environment).folder == tmp_path / "manifest" / "model"


def test_unreachable_hub_is_a_temporary_failure(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ServiceUnavailable, match="hf://organisation/name"):
        paths("hf://organisation/name/rows.jsonl", environment)
