"""Data sets of the Hub: a path names a file, a pattern or a folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores.hub_environment import hub_in
from support.stores.hub_state import Hub

from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    SourceNotFound,
)
from finetune_trainer.stores.hub.source import HubSource
from finetune_trainer.stores.port import RemoteFile

NAME = "people/tiny"
URI = "hf://people/tiny"
DATA = {
    "README.md": b"# Rows\n",
    "data/train-00000.jsonl": b'{"text": "a"}\n',
    "data/train-00001.jsonl": b'{"text": "b"}\n',
    "data/test.jsonl": b'{"text": "c"}\n',
    "data/more/train-9.jsonl": b'{"text": "d"}\n',
    "rows.parquet": b"PAR1",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in(tmp_path / "hub", monkeypatch) as hub:
        yield hub


def listed(source: HubSource, pin: str | None = None) -> dict[str, RemoteFile]:
    return {file.name: file for file in source.list_files(pin).files}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("rows.parquet", {"rows.parquet"}),
        ("data/test.jsonl", {"test.jsonl"}),
        ("data/train-*.jsonl", {"train-00000.jsonl", "train-00001.jsonl"}),
        ("data/train-0000[1].jsonl", {"train-00001.jsonl"}),
        (
            "data",
            {
                "train-00000.jsonl",
                "train-00001.jsonl",
                "test.jsonl",
                "more/train-9.jsonl",
            },
        ),
    ],
)
def test_path_of_a_data_set_names_a_file_pattern_or_folder(
    path: str, names: set[str], hub: Hub, tmp_path: Path
) -> None:
    hub.add_repository(NAME, DATA, kind="datasets")
    source = HubSource(f"{URI}/{path}", "dataset")
    files = listed(source)
    name = min(names)
    source.download(files[name], tmp_path / "rows")

    assert set(files) == names
    assert (tmp_path / "rows").read_bytes() in DATA.values()
    assert (tmp_path / "rows").stat().st_size == files[name].size


@pytest.mark.parametrize(
    "path",
    ["rows.csv", "data/valid-*.jsonl", "nowhere/rows.jsonl", "data/test.jsonl/x"],
)
def test_path_that_names_nothing_is_reported(path: str, hub: Hub) -> None:
    hub.add_repository(NAME, DATA, kind="datasets")

    with pytest.raises(
        SourceNotFound, match=r"has no such file at [0-9a-f]{40}; correct the path"
    ):
        HubSource(f"{URI}/{path}", "dataset").list_files(None)


@pytest.mark.parametrize(
    "name",
    ["../outside.jsonl", "/outside.jsonl", "data/../../outside.jsonl", "a\\\\b.jsonl"],
)
def test_path_of_a_hostile_hub_is_refused(name: str, hub: Hub) -> None:
    hub.add_repository(NAME, DATA | {name: b"x"}, kind="datasets")

    with pytest.raises(DataInvalid, match="which is no path; use another hub"):
        HubSource(URI, "dataset", split="train").list_files(None)


def test_split_of_a_data_set_is_listed_at_its_commit(hub: Hub) -> None:
    repository = hub.add_repository(NAME, DATA, kind="datasets")
    repository.push(
        {
            "README.md": b"---\nconfigs:\n- config_name: a\n  data_files:\n  - {split: new, path: rows.parquet}\n---\n"
        }
    )
    with_config = repository.head
    repository.push({"README.md": b"# Rows\n"}, delete=("data/more/train-9.jsonl",))

    assert set(listed(HubSource(URI, "dataset", split="new"), with_config)) == {
        "rows.parquet"
    }
    assert set(listed(HubSource(URI, "dataset", split="train"))) == {
        "data/train-00000.jsonl",
        "data/train-00001.jsonl",
    }
    with pytest.raises(
        ConfigInvalid, match="has no split new; set split to one of test, train"
    ):
        HubSource(URI, "dataset", split="new").list_files(None)


@pytest.mark.parametrize(
    ("uri", "options", "message"),
    [
        ("hf://", {}, "use hf://ORG/NAME"),
        ("hf://people/tiny/../other", {}, "use hf://ORG/NAME"),
        (
            "hf://people/tiny/data/*/rows.jsonl",
            {},
            "only the last part of the path may be a pattern",
        ),
        (
            "hf://people/tiny@v1",
            {"revision": "v2"},
            "names the revision v1, but revision is v2",
        ),
        (
            "hf://people/tiny/rows.jsonl",
            {"split": "train"},
            "config and split select files of hf://ORG/NAME",
        ),
    ],
)
def test_invalid_source_is_refused(
    uri: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        HubSource(uri, "dataset", **options)
