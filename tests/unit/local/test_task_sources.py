"""An edit of any local file that a task reads changes the digest of its task file."""

from pathlib import Path

import pytest

from finetune_operator.local.digests import SourceDigests
from finetune_trainer.contract import Environment

FILES = {
    "both.yaml": "group: both\ntask: [refunds, {group: inner, task: [greetings]}]\n",
    "below/refunds.yaml": "include: ../common\ntask: refunds\ntest_split: test\n",
    "greetings.yml": "{tag: [x, greetings], task: other, dataset_path: ./folder}\n",
    "common": "dataset_kwargs: {data_files: {test: 'data/*.jsonl'}}\n"
    "process_docs: !function utils.clean\ninclude: base.inc\n",
    "base.inc": "dataset_kwargs: {data_dir: directory}\n",
    "utils.py": "import helper\nfrom pkg import part\nWORDS = open('words.txt')\n",
    "helper.py": "x = 1\n",
    "pkg/part.py": "y = 1\n",
    "words.txt": "a\n",
    "data/one.jsonl": "{}\n",
    "folder/deep/two.csv": "a\n",
    "directory/three.json": "{}\n",
}
UNREAD = {
    "another.yaml": "task: another\ndataset_kwargs: {data_files: unread.jsonl}\n",
    "unread.jsonl": "{}\n",
    ".venv/refunds.yaml": "task: refunds\n",
    "broken.yaml": "task: [\n",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def digest(folder: Path, name: str = "both.yaml") -> str:
    environment = Environment(folder / "work", manifest_dir=folder)
    digests = SourceDigests(folder / "contents.json", save=False)
    return digests.digests([name], environment)[name]


@pytest.mark.parametrize("name", FILES)
def test_edit_of_a_file_that_a_task_reads_changes_its_digest(tmp_path: Path, name: str):
    write(tmp_path, FILES | UNREAD)
    before = digest(tmp_path)
    write(tmp_path, {name: FILES[name] + "\n"})
    assert digest(tmp_path) != before


@pytest.mark.parametrize("name", UNREAD)
def test_edit_of_another_file_keeps_the_digest(tmp_path: Path, name: str):
    write(tmp_path, FILES | UNREAD)
    before = digest(tmp_path)
    write(tmp_path, {name: UNREAD[name] + "\n"})
    assert digest(tmp_path) == before


def test_copy_of_the_folder_has_the_same_digest(tmp_path: Path):
    write(tmp_path / "a", FILES)
    write(tmp_path / "b", FILES)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_new_file_that_a_pattern_matches_changes_the_digest(tmp_path: Path):
    write(tmp_path, FILES)
    before = digest(tmp_path)
    write(tmp_path, {"data/four.jsonl": "{}\n"})
    assert digest(tmp_path) != before


def test_files_that_include_each_other_have_a_digest(tmp_path: Path):
    write(tmp_path, {"a.yaml": "include: b.yaml\n", "b.yaml": "include: a.yaml\n"})
    before = digest(tmp_path, "a.yaml")
    write(tmp_path, {"b.yaml": "include: a.yaml\ntask: a\n"})
    assert digest(tmp_path, "a.yaml") != before
