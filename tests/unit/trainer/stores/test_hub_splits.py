"""Which files belong to a config and a split, compared with the library `datasets` itself."""

from pathlib import Path

import pytest

from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.stores.hub.splits import files_of_split

URI = "hf://people/rows"
LAYOUTS = {
    "one file": ["rows.jsonl", "LICENSE", ".gitattributes"],
    "split in file name": ["train.jsonl", "test.jsonl", "my-validation-part.jsonl"],
    "split in folder name": [
        "train/a.parquet",
        "train/b.parquet",
        "dev/a.parquet",
        "train/.hidden.parquet",
    ],
    "shards": [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/extra.parquet",
    ],
    "shards of any split": [
        "data/gold-00000-of-00001.parquet",
        "data/silver-00000-of-00001.parquet",
    ],
    "most are Parquet": ["a.parquet", "b.parquet", "info.jsonl"],
}
PATTERNS = """\
configs:
- config_name: english
  data_files: english/*.jsonl
- config_name: german
  default: true
  data_files:
  - split: train
    path: [german/one.jsonl, german/two.jsonl]
  - split: test
    path: german/test-*.jsonl
- config_name: folder
  data_dir: french
- config_name: tabs
  data_files: tabs.csv
  sep: "\\t"
"""
FILES = {
    "README.md",
    "english/a.jsonl",
    "english/b.jsonl",
    "german/one.jsonl",
    "german/two.jsonl",
    "german/test-1.jsonl",
    "french/train.jsonl",
    "french/test.jsonl",
    "tabs.csv",
}


def card(yaml: str) -> str:
    return f"---\nlicense: mit\n{yaml}---\n# Rows\n"


def expected(folder: Path, config: str | None) -> dict[str, set[str]]:
    """Return the files of each split that `datasets` finds in a folder."""
    from datasets import load_dataset_builder  # noqa: PLC0415  takes seconds

    data_files = load_dataset_builder(
        str(folder), config, cache_dir=str(folder / ".cache")
    ).config.data_files
    return {
        split: {Path(file).relative_to(folder).as_posix() for file in files}
        for split, files in data_files.items()
    }


def write(folder: Path, names: set[str], readme: str) -> set[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "README.md").write_text(readme)
    return names | {"README.md"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_by_names_are_those_of_datasets(layout: str, tmp_path: Path) -> None:
    names = write(tmp_path, set(LAYOUTS[layout]), "# Rows\n")

    for split, files in expected(tmp_path, None).items():
        assert files_of_split(URI, names, "# Rows\n", None, split) == files


@pytest.mark.parametrize("config", [None, "english", "german", "folder"])
def test_splits_of_configs_are_those_of_datasets(
    config: str | None, tmp_path: Path
) -> None:
    readme = card(PATTERNS)
    names = write(tmp_path, FILES, readme)

    for split, files in expected(tmp_path, config).items():
        assert files_of_split(URI, names, readme, config, split) == files


def test_only_split_needs_no_name() -> None:
    assert files_of_split(URI, FILES, card(PATTERNS), "english", None) == {
        "english/a.jsonl",
        "english/b.jsonl",
    }


@pytest.mark.parametrize(
    ("config", "split", "message"),
    [
        (
            "spanish",
            None,
            "has no config spanish; set config to one of english, folder, german, tabs",
        ),
        ("german", "dev", "has no split dev; set split to one of test, train"),
        ("german", None, "has several splits; set split to one of test, train"),
        (
            "german",
            "train[:10]",
            r"has no split train\[:10\]; set split to one of test, train",
        ),
        (
            "tabs",
            None,
            "its config tabs sets sep, which is not supported; name files by a path",
        ),
    ],
)
def test_unknown_config_or_split_names_those_there_are(
    config: str, split: str | None, message: str
) -> None:
    with pytest.raises(ConfigInvalid, match=f"{URI}:? {message}"):
        files_of_split(URI, FILES, card(PATTERNS), config, split)


def test_several_configs_without_a_default_are_named() -> None:
    yaml = "configs:\n- {config_name: a, data_files: a.jsonl}\n- {config_name: b, data_files: b.jsonl}\n"

    with pytest.raises(
        ConfigInvalid, match="has several configs; set config to one of a, b"
    ):
        files_of_split(URI, {"a.jsonl", "b.jsonl"}, card(yaml), None, None)


@pytest.mark.parametrize(
    ("files", "yaml", "message"),
    [
        (
            {"a.jsonl"},
            "configs: [{config_name: a, data_files: /etc/*}]\n",
            "names /etc/.*, which is outside",
        ),
        (
            {"a.jsonl"},
            "configs: [{config_name: a, data_files: ../../*}]\n",
            r"names \.\./\.\./.*, which is outside",
        ),
        (
            {"a.jsonl"},
            "configs: [{config_name: a, data_files: 'https://h/x.jsonl'}]\n",
            "names https://h/x.jsonl",
        ),
        (
            {"a.jsonl"},
            "configs: [{config_name: a, data_dir: ../b}]\n",
            r"names \.\./b, which is outside",
        ),
        (
            {"a.jsonl"},
            "configs: [{config_name: a, data_files: b.jsonl}]\n",
            "no files belong to its config a",
        ),
        (
            {"a.jsonl"},
            "configs: [{config_name: a, data_files: [{split: train}]}]\n",
            "data_files of its README.md has",
        ),
        ({"a.jsonl"}, "configs: many\n", "configs of its README.md is no list"),
        ({"a.jsonl"}, "configs: [\n", "the YAML of its README.md cannot be read"),
        (
            {"a.jsonl.gz", "b.jsonl.gz", "c.jsonl"},
            "",
            r"most of its files are \.gz; supported are .*\.parquet",
        ),
        ({"rows.py", "README.md"}, "", "most of its files are no data"),
        (set(), "", "no files belong to its config default"),
    ],
)
def test_data_files_that_are_not_supported_are_refused(
    files: set[str], yaml: str, message: str
) -> None:
    with pytest.raises(ConfigInvalid, match=f"{URI}: (its README.md )?{message}"):
        files_of_split(URI, files, card(yaml), None, None)
