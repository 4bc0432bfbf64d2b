"""`finetune preview`, and the same preview in `validate --check` and `plan`, which is a process of the trainer.

The first test starts it, and so do the tests of a process that fails.
"""

import json
import sys

import pytest
import yaml

from finetune_cli.__main__ import main

RECORDS = [
    {"prompt": f"What is {number} plus 2?", "completion": f" {number + 2}"}
    for number in range(20)
]


@pytest.fixture
def manifest(tiny_model, tmp_path, monkeypatch):
    """A function that writes p.yaml and its records."""
    monkeypatch.chdir(tmp_path)

    def manifest(records, **spec):
        lines = [json.dumps(record) for record in records]
        (tmp_path / "data.jsonl").write_text("\n".join(lines))
        spec = {
            "model": {"uri": f"file://{tiny_model}"},
            "datasets": [{"uri": "data.jsonl"}],
            "prepare": {"contextLength": 64},
            "train": {},
            **spec,
        }
        pipeline = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
            "spec": spec,
        }
        (tmp_path / "p.yaml").write_text(yaml.safe_dump(pipeline))

    return manifest


def test_preview_marks_the_learned_part(manifest, capsys):
    manifest(RECORDS)
    assert main(["preview", "p.yaml", "-n", "1"]) == 0
    output = capsys.readouterr().out
    heading, text, *_ = output.splitlines()
    assert heading.startswith("data.jsonl:1  ")
    assert "learned (" in heading
    _, mark, learned = text.partition("{+ 2")
    assert mark
    assert learned.endswith("+}")
    assert "20 records: 20 usable" in output


@pytest.mark.usefixtures("trainer_here")
def test_preview_writes_nothing(manifest, tmp_path):
    manifest(RECORDS)
    before = sorted(tmp_path.rglob("*"))
    main(["preview", "p.yaml"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("trainer_here")
def test_preview_of_invalid_records_names_line_and_field(manifest, capsys):
    manifest([*RECORDS, {"prompt": "?"}])
    assert main(["preview", "p.yaml", "-n", "0"]) == 2
    output = capsys.readouterr().out
    assert "21 records: 20 usable, 1 invalid" in output
    assert output.count("data.jsonl:21: completion is missing") == 1
    assert "spec.datasets[0].uri: 1 of 21 records are invalid" in output


@pytest.mark.usefixtures("trainer_here")
def test_allowed_invalid_records_are_named_once(manifest, capsys):
    manifest(
        [*RECORDS, {"prompt": "?"}],
        prepare={"contextLength": 64, "maxInvalidFraction": 0.5},
    )
    assert main(["preview", "p.yaml", "-n", "0"]) == 0
    output = capsys.readouterr().out
    assert output.count("completion is missing") == 1


@pytest.mark.usefixtures("trainer_here")
@pytest.mark.parametrize(
    "command", [["preview", "p.yaml"], ["validate", "--check", "p.yaml"]]
)
def test_notes_about_records_are_in_both_commands(manifest, capsys, command):
    ended = {"prompt": "Where?", "completion": " Here<eos>", "score": 2}
    manifest([*RECORDS, ended, ended])
    assert main(command) == 0
    output = capsys.readouterr().out
    assert (
        "2 records have the text of a special token (<eos>; first data.jsonl:21)"
        in output
    )
    assert "columns that are not read: score" in output
    assert "score may say which records are good, but every record is learned" in output


@pytest.mark.usefixtures("trainer_here")
def test_check_reads_all_records(manifest, capsys):
    manifest([*RECORDS, {"prompt": "?"}])
    assert main(["validate", "--check", "p.yaml"]) == 2
    output = capsys.readouterr().out
    assert "spec.datasets[0].uri: 1 of 21 records are invalid" in output
    assert "data.jsonl:21: completion is missing" in output


@pytest.mark.usefixtures("trainer_here")
def test_check_says_how_many_records_are_usable(manifest, capsys):
    manifest(RECORDS)
    assert main(["validate", "--check", "p.yaml"]) == 0
    assert "p.yaml: data: 20 records: 20 usable (note)" in capsys.readouterr().out


@pytest.mark.usefixtures("trainer_here")
def test_plan_before_prepare_knows_rows_tokens_and_steps(manifest, capsys):
    manifest(RECORDS)
    assert main(["plan", "p.yaml"]) == 0
    output = capsys.readouterr().out
    assert "of them learned" in output
    assert "rows of 64 tokens" in output
    assert "known when prepare is done" not in output


def test_reader_that_fails_is_an_error_and_not_valid(manifest, capsys, monkeypatch):
    manifest(RECORDS)
    failing = (sys.executable, "-c", "raise ZeroDivisionError('a fault')")
    monkeypatch.setattr("finetune_cli.checks.trainer_process.COMMAND", failing)
    assert main(["validate", "--check", "p.yaml"]) == 2
    output = capsys.readouterr().out
    assert "the records cannot be read: ZeroDivisionError: a fault" in output


def test_records_stay_unread_without_the_trainers_packages(
    manifest, capsys, monkeypatch
):
    manifest(RECORDS)
    absent = (sys.executable, "-c", "import no_such_package")
    monkeypatch.setattr("finetune_cli.checks.trainer_process.COMMAND", absent)
    assert main(["validate", "--check", "p.yaml"]) == 0
    assert "the records were not read" in capsys.readouterr().out
