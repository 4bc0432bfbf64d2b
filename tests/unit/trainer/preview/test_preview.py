"""A preview reads the records as prepare does, and shows the text and the learned part of the first ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_trainer.contract import Environment, PrepareConfig
from finetune_trainer.contract.preview import PreviewReport, PreviewRequest
from finetune_trainer.preview.preview import preview

PAIRS = [
    {"prompt": f"What is {number} plus 2?", "completion": f" {number + 2}"}
    for number in range(40)
]


def config_of(base: Path, data: Path, **changes: object) -> PrepareConfig:
    fields: dict[str, object] = {
        "identity": "a" * 16,
        "seed": 1,
        "model": {"uri": f"file://{base}"},
        "datasets": [{"uri": f"file://{data}"}],
        "recipe": {"contextLength": 64},
    }
    return PrepareConfig.model_validate(fields | changes)


@pytest.fixture
def look(tiny_model: Path, tmp_path: Path):
    """A function that previews records, which are written to data.jsonl."""

    def look(records: list[object], examples: int = 2, **changes: object):
        data = tmp_path / "data.jsonl"
        lines = [json.dumps(record) for record in records]
        data.write_text("\n".join(lines) + "\n")
        config = config_of(tiny_model, data, **changes)
        request = PreviewRequest(config=config, examples=examples)
        return preview(request, Environment(workspace=tmp_path / "workspace"))

    return look


def test_completion_alone_is_shown_as_learned(look):
    report = look(PAIRS)
    first, second = report.examples
    assert first.file == "data.jsonl"
    assert first.line == 1
    assert second.line == 2
    prompt, completion = first.segments
    assert prompt.text.endswith("0 plus 2?")
    assert prompt.learned is False
    # The end of the text is learned, too.
    assert completion.text.startswith(" 2")
    assert len(completion.text) > len(" 2")
    assert completion.learned
    assert 0 < first.learned_tokens < first.tokens


def test_counts_are_those_of_all_records(look):
    report = look([*PAIRS, {"prompt": "?", "completion": " word" * 200}])
    counts = report.counts
    assert counts.records == 41
    assert counts.invalid == 0
    assert counts.truncated == 1
    assert counts.train_rows > 0
    assert 0 < counts.train_targets < counts.train_tokens
    assert report.problems == ()


def test_single_words_are_counted_once_beside_examples(look):
    report = look([pair | {"topic": "sums"} for pair in PAIRS[:2]], examples=2)
    assert report.counts.unread_words == 2


def test_invalid_records_are_a_problem_of_their_data_set(look):
    report = look([*PAIRS, {"prompt": "?", "completion": None}])
    [problem] = report.problems
    assert problem.field == "datasets[0].uri"
    assert "1 of 41 records are invalid" in problem.message
    assert "data.jsonl:41: completion is null" in problem.message
    assert report.invalid_records == (
        "data.jsonl:41: completion is null: write a text, or remove the record",
    )
    # What can be used is counted and shown all the same.
    assert report.counts.invalid == 1
    assert len(report.examples) == 2


def test_allowed_invalid_records_are_named_and_no_problem(look):
    recipe = {"contextLength": 64, "maxInvalidFraction": 0.5}
    report = look([*PAIRS, {"prompt": "?"}], recipe=recipe)
    assert report.problems == ()
    assert report.invalid_records == ("data.jsonl:41: completion is missing",)


def test_missing_model_and_missing_data_are_both_named(look, tmp_path):
    missing = {"uri": f"file://{tmp_path}/nothing"}
    report = look(PAIRS, model=missing, datasets=[missing])
    assert [problem.field for problem in report.problems] == [
        "model.uri",
        "datasets[0].uri",
    ]
    assert report.counts is None


def test_claim_of_the_cluster_is_not_looked_at(look):
    report = look(PAIRS, datasets=[{"uri": "pvc://team-data/train.jsonl"}])
    assert report.problems == ()
    [line] = report.not_looked_at
    assert line.startswith("pvc://team-data/train.jsonl: the claim team-data")


def test_file_that_is_no_data_set_is_a_problem_of_the_data_set(look, tmp_path):
    second = tmp_path / "notes.txt"
    second.write_text("some words")
    data = [{"uri": f"file://{tmp_path}/data.jsonl"}, {"uri": f"file://{second}"}]
    [problem] = look(PAIRS, datasets=data).problems
    assert (problem.field, problem.message[:20]) == (
        "datasets[1].uri",
        "notes.txt: .txt is p",
    )


def test_truncated_example_says_so(look):
    recipe = {"contextLength": 32, "tooLong": "Truncate"}
    report = look([{"text": "word " * 300}], recipe=recipe)
    [example] = report.examples
    assert example.tokens == 32
    assert example.truncated is True


def test_process_answers_on_stdout_and_writes_nothing(tiny_model, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, PAIRS)))
    request = PreviewRequest(config=config_of(tiny_model, data), examples=1)
    before = sorted(tmp_path.rglob("*"))
    process = subprocess.run(
        [sys.executable, "-m", "finetune_trainer.preview"],
        input=request.model_dump_json(by_alias=True),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"FINETUNE_WORKSPACE": str(tmp_path / "workspace")},
    )
    report = PreviewReport.model_validate_json(process.stdout)
    assert report.counts
    assert report.counts.records == 40
    assert sorted(tmp_path.rglob("*")) == before


EXCHANGE = {
    "messages": [
        {"role": "user", "content": "A reader"},
        {"role": "assistant", "content": "opens"},
    ]
}


def test_records_have_the_template_of_the_manifest(look):
    template = "{{ sign }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    recipe = {"chatTemplate": template, "chatTemplateArguments": {"sign": "!"}}
    report = look([EXCHANGE], recipe={"contextLength": 64, **recipe})
    [example] = report.examples
    text = "".join(segment.text for segment in example.segments)
    assert text == "!<A reader><opens>"


@pytest.mark.parametrize(
    ("recipe", "field", "message"),
    [
        (
            {"chatTemplate": "\n{{ x"},
            "prepare.chatTemplate",
            "line 2: unexpected end of template",
        ),
        (
            {"chatTemplateArguments": {"thinking": True}},
            "prepare.chatTemplateArguments.thinking",
            "the chat template does not read it; it reads no argument",
        ),
        ({"chatTemplate": "none.jinja"}, "prepare.chatTemplate", "none.jinja"),
    ],
)
def test_unusable_template_is_a_problem_of_its_field(look, recipe, field, message):
    report = look([EXCHANGE], recipe={"contextLength": 64, **recipe})
    [problem] = report.problems
    assert problem.field == field
    assert problem.message.startswith(message)
    assert report.examples == ()


def test_template_on_a_claim_of_the_cluster_is_not_looked_at(look):
    recipe = {"contextLength": 64, "chatTemplate": "pvc://team/chat.jinja"}
    report = look([EXCHANGE], recipe=recipe)
    assert report.problems == ()
    assert "the claim team is not mounted" in report.not_looked_at[0]
