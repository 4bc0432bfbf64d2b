"""`finetune init` reads the model and the records on this machine."""

import csv
import gzip
import json
import shutil

import pytest

from finetune_cli.__main__ import main
from finetune_cli.manifest.manifest import read


@pytest.fixture
def init(tmp_path, monkeypatch, capsys):
    """A function that writes records to a file, runs init, and returns the spec of the manifest."""
    monkeypatch.chdir(tmp_path)

    def init(records, *options, name="data.jsonl"):
        lines = [json.dumps(record) for record in records]
        (tmp_path / name).write_text("\n".join(lines))
        assert main(["init", "--force", "--data", name, *options]) == 0
        return read(tmp_path / "pipeline.yaml").spec

    return init


def prompts(count, words=3):
    return [{"prompt": "a " * words, "completion": "b"} for _ in range(count)]


@pytest.fixture
def model(tmp_path):
    """A function that writes a model with so many positions."""

    def model(**config):
        (tmp_path / "base").mkdir(exist_ok=True)
        (tmp_path / "base/config.json").write_text(json.dumps(config))
        return ("--model", "base")

    return model


@pytest.mark.usefixtures("any_base")
@pytest.mark.parametrize(
    ("words", "positions", "length"),
    [(3, None, 256), (400, None, 512), (3000, None, 4096), (3000, 512, 512), (3, 128, 128)],
)  # fmt: skip
def test_context_length_suits_the_records_and_the_model(
    init, model, words, positions, length
):
    options = model(max_position_embeddings=positions) if positions else ()
    assert init(prompts(500, words), *options).prepare.context_length == length


def test_one_long_record_of_many_does_not_decide(init):
    records = [*prompts(500), *prompts(1, words=20_000)]
    assert init(records).prepare.context_length == 256


@pytest.mark.usefixtures("trainer_here")
def test_tokens_are_counted_by_the_tokenizer_of_the_model(init, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "base")
    records = [{"text": "the file " * 150} for _ in range(200)]
    # 300 tokens are 1,350 characters, which would be estimated as 675 tokens.
    spec = init(records, "--model", "base")
    assert spec.prepare.context_length == 512


@pytest.mark.parametrize(
    ("count", "batch"), [(10_000, (4, 4)), (600, (4, 1)), (20, (1, 1))]
)
def test_batch_leaves_several_steps(init, count, batch):
    train = init(prompts(count, words=60)).train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == batch


COLUMNS = [
    (
        {"question": "a", "answer": "b"},
        {"instruction": "question", "output": "answer"},
    ),
    ({"source": "a", "target": "b"}, {"prompt": "source", "completion": "target"}),
    ({"prompt": "a", "response": "b"}, {"completion": "response"}),
    ({"id": 1, "dialogue": []}, {"messages": "dialogue"}),
    ({"content": "a"}, {"text": "content"}),
    ({"messages": []}, {}),
    ({"text": "a", "id": 3}, {}),
    ({"conversations": []}, {}),
    ({"instruction": "a", "input": "", "output": "b"}, {}),
    ({"chosen": "a", "rejected": "b"}, {}),
    ({"x": "a", "y": "b"}, {}),
]


@pytest.mark.parametrize(("record", "columns"), COLUMNS)
def test_columns_with_other_names_are_written(init, record, columns):
    [dataset] = init([record]).datasets
    written = {}
    if dataset.columns:
        written = dataset.columns.named()
    assert written == columns


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Support_Tickets.jsonl", "support-tickets"),
        ("train.v2.jsonl", "train"),
        ("数据.jsonl", "my-pipeline"),
        ("_.jsonl", "my-pipeline"),
    ],
)
def test_pipeline_is_named_after_its_data(init, tmp_path, file, name):
    init([{"text": "a"}], name=file)
    assert read(tmp_path / "pipeline.yaml").name == name


def test_prompt_of_the_smoke_test_is_from_the_data(init):
    """Chat, prompt with quotes and line breaks, and a text without a prompt."""
    chat = {"messages": [{"role": "user", "content": "Who: 'me'?\nYes"}]}
    assert init([chat]).deploy.smoke_test.prompt == "Who: 'me'?\nYes"
    assert init([{"text": "a"}]).deploy.smoke_test.prompt == "Hello"
    long = {"prompt": "a" * 999, "completion": "b"}
    assert init([long]).deploy.smoke_test.prompt == "Hello"


def test_csv_and_compressed_records_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], ["a", "b"]])
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"question": "a", "answer": "b"}\n')
    for name in ("a.csv", "b.jsonl.gz"):
        assert main(["init", "--force", "--data", name]) == 0
        [dataset] = read(tmp_path / "pipeline.yaml").spec.datasets
        assert dataset.columns
        assert dataset.columns.instruction == "question"


def test_unknown_columns_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"x": "a", "y": "b"}\n')
    assert main(["init", "--data", "data.jsonl"]) == 0
    assert "with the columns x, y: write columns" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1, 2]\n", b"null\n"])
def test_unreadable_records_leave_the_defaults(tmp_path, monkeypatch, capsys, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_bytes(content)
    assert main(["init", "--data", "data.jsonl"]) == 0
    assert read(tmp_path / "pipeline.yaml").spec.prepare.context_length == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt2"), "does not exist; correct the URI or create it; for a repository"),
        (("--model", "bsae"), "did you mean"),
        (("--data", "dta.jsonl"), "did you mean"),
        (("--data", "nope.jsonl"), "does not exist"),
        (("--data", "no/data.jsonl"), "does not exist"),
        (("--model", "empty"), "has no config.json"),
        (("--model", "adapter"), "is an adapter: name its base model here"),
        (("--data", "none-*.jsonl"), "matches no file"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("init")
def test_source_that_does_not_exist_is_refused(
    tmp_path, capsys, model, arguments, message
):
    model()
    (tmp_path / "data.jsonl").write_text("{}\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert main(["init", *arguments]) == 2
    error = capsys.readouterr().err
    assert f"{arguments[0]} {arguments[1]}: " in error
    assert message in error
    assert not (tmp_path / "pipeline.yaml").exists()


@pytest.mark.parametrize(
    ("count", "fraction"), [(500, 0.05), (100, 0.1), (24, 0.42), (6, 0.5)]
)
def test_small_data_hold_out_enough_records_for_the_gate(init, count, fraction):
    assert init(prompts(count)).validation.fraction == fraction
