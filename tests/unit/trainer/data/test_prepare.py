"""The stage prepare with valid records."""

import json
import re
import resource
from pathlib import Path

import pytest
from support.trainer.models import prompt_records, write_jsonl
from support.trainer.prepared import (
    IDENTITY,
    make_tokenizer,
    output_folder,
    packed_documents,
    prepare,
    prepare_config,
    trained_texts,
)
from support.trainer.stages import (
    environment_in,
    read_progress,
    run_in_process,
    run_to_failure,
)

from finetune_trainer.contract import DatasetSource, Environment, ExitCode
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.reading.datasets import OpenDataset, RecordReader
from finetune_trainer.runtime import artifacts
from finetune_trainer.stores.data_files import DataFile


@pytest.fixture
def model(tokenizer_folder: Path) -> Path:
    return tokenizer_folder


@pytest.fixture
def data(manifest_dir: Path) -> Path:
    return manifest_dir / "data.jsonl"


def test_rows_contain_all_records_and_result_counts_them(
    model: Path, environment: Environment, data: Path
) -> None:
    write_jsonl(data, prompt_records(500))
    result = prepare(prepare_config(model, validation_fraction=0.2), environment)

    train = packed_documents(environment, "train")
    validation = packed_documents(environment, "validation")
    output = output_folder(environment)
    assert len(train) + len(validation) == result.records == 500
    assert 60 < len(validation) < 140
    assert result.train_rows == len(PackedRows(output, "train"))
    assert result.validation_rows == len(PackedRows(output, "validation"))
    assert result.train_tokens == sum(len(tokens) for tokens, _ in train)
    assert result.invalid == 0
    assert result.truncated == 0
    assert result.dropped == 0
    assert result.data_digest == "sha256:" + artifacts.digest_file(data)
    assert result.digest == artifacts.digest_of(output)
    progress = read_progress(environment)
    assert progress["step"] == 500
    assert progress["total"] == 500


def test_rows_are_determined_by_config_and_seed(
    model: Path, tmp_path: Path, data: Path, environment: Environment
) -> None:
    write_jsonl(data, prompt_records(300))
    digests = []
    for run, seed in enumerate((1, 1, 2)):
        run_environment = environment_in(tmp_path / f"run-{run}")
        write_jsonl(
            tmp_path / f"run-{run}" / "manifest" / "data.jsonl", prompt_records(300)
        )
        config = prepare_config(model, seed=seed, validation_fraction=0.3)
        digests.append(prepare(config, run_environment).digest)

    assert digests[0] == digests[1] != digests[2]


def test_record_stays_in_its_split_when_others_are_appended(
    model: Path, environment: Environment, data: Path
) -> None:
    records: list[dict[str, object]] = [
        {"text": f"line {number}"} for number in range(200)
    ]
    config = prepare_config(model, validation_fraction=0.3)
    write_jsonl(data, records[:100])
    prepare(config, environment)
    before = {
        tuple(tokens) for tokens, _ in packed_documents(environment, "validation")
    }

    write_jsonl(data, records)
    (output_folder(environment).parent / "result.json").unlink()
    prepare(config, environment)
    after = {tuple(tokens) for tokens, _ in packed_documents(environment, "validation")}

    assert before < after


def test_loss_covers_completion_and_eos_but_not_the_prompt(
    model: Path, environment: Environment, data: Path
) -> None:
    tokenizer = make_tokenizer(model)
    write_jsonl(
        data, [{"prompt": "A reader opens\nVerb:", "completion": " opens the file"}]
    )
    prepare(prepare_config(model), environment)

    assert trained_texts(environment, tokenizer) == [" opens the file<eos>"]
    [(tokens, _)] = packed_documents(environment)
    assert tokenizer.decode(tokens) == "A reader opens\nVerb: opens the file<eos>"


def test_loss_covers_all_of_a_text_but_its_first_token(
    model: Path, environment: Environment, data: Path
) -> None:
    write_jsonl(data, [{"text": "A reader opens the file"}])
    prepare(prepare_config(model), environment)

    [(_, loss_mask)] = packed_documents(environment)
    assert loss_mask == [0] + [1] * (len(loss_mask) - 1)


def test_bos_and_eos_are_written_once(
    tmp_path: Path, environment: Environment, data: Path
) -> None:
    make_tokenizer(tmp_path / "bos", writes_bos=True)
    write_jsonl(data, [{"text": "the file"}, {"text": "<bos>a socket"}])
    prepare(prepare_config(tmp_path / "bos"), environment)

    for tokens, loss_mask in packed_documents(environment):
        assert tokens.count(1) == 1
        assert tokens[0] == 1
        assert loss_mask[:2] == [0, 1]
        assert tokens.count(2) == 1
        assert tokens[-1] == 2


def test_long_record_is_truncated_to_context_length(
    model: Path, environment: Environment, data: Path
) -> None:
    write_jsonl(data, [{"text": "the file " * 100}, {"text": "short"}])
    result = prepare(prepare_config(model, too_long="Truncate"), environment)

    assert result.truncated == 1
    assert result.dropped == 0
    assert max(len(tokens) for tokens, _ in packed_documents(environment)) == 64


def test_long_record_is_dropped_with_too_long_drop(
    model: Path, environment: Environment, data: Path
) -> None:
    write_jsonl(data, [{"text": "the file " * 100}, {"text": "short"}])
    result = prepare(prepare_config(model, too_long="Drop"), environment)

    assert result.truncated == 0
    assert result.dropped == 1
    assert len(packed_documents(environment)) == 1


def test_record_is_dropped_if_truncation_removes_its_completion(
    model: Path, environment: Environment, data: Path
) -> None:
    write_jsonl(
        data,
        [{"prompt": "the file " * 100, "completion": " opens"}, *prompt_records(1)],
    )
    result = prepare(prepare_config(model), environment)

    assert result.truncated == 0
    assert result.dropped == 1


def test_small_data_set_may_have_no_validation_rows(
    model: Path,
    environment: Environment,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(data, prompt_records(3))
    result = prepare(prepare_config(model, validation_fraction=0.01), environment)

    assert result.validation_rows == 0
    assert len(PackedRows(output_folder(environment), "validation")) == 0
    assert "no validation rows" in capsys.readouterr().out


def test_space_at_the_end_of_a_prompt_is_reported(
    model: Path,
    environment: Environment,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(
        data,
        [
            {"prompt": "Verb: ", "completion": "opens"},
            {"prompt": "Verb:", "completion": " opens"},
        ],
    )
    prepare(prepare_config(model), environment)

    assert (
        "in 1 examples a token spans prompt and completion" in capsys.readouterr().out
    )


def test_result_is_reused_until_its_output_is_corrupt(
    model: Path,
    environment: Environment,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(data, prompt_records(50))
    config = prepare_config(model)
    first = prepare(config, environment)
    data.unlink()
    assert prepare(config, environment) == first

    write_jsonl(data, prompt_records(50))
    tokens = output_folder(environment) / "train-00000.rows"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x7f")
    assert prepare(config, environment) == first
    assert (
        "train-00000.rows does not match the digest in its manifest"
        in capsys.readouterr().out
    )
    artifacts.verify(output_folder(environment))


def test_leftovers_of_killed_attempts_are_removed(
    model: Path, environment: Environment, data: Path
) -> None:
    folder = environment.stage_dir("prepare", IDENTITY)
    (folder / "partial" / "rows").mkdir(parents=True)
    for leftover in (
        ".part-00000.json.4711",
        "part-00000.json",
        "rows/train-00007.rows",
        "rows/manifest.json",
    ):
        (folder / "partial" / leftover).write_bytes(b"half a row")
    write_jsonl(data, prompt_records(5))
    prepare(prepare_config(model), environment)

    assert sorted(path.name for path in folder.iterdir()) == [
        ".attempts",
        ".lock",
        ".pipelines",
        "config.json",
        "output",
        "result.json",
    ]
    names = ["chat_templates.json", "manifest.json", "rows.json", "train-00000.rows"]
    assert sorted(path.name for path in (folder / "output").iterdir()) == names


def test_summary_and_progress_name_tokens_per_second(
    model: Path,
    environment: Environment,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(data, prompt_records(50))
    prepare(prepare_config(model), environment)

    assert re.search(
        r"prepare: \d+ training rows .*; [\d,]+ tokens/s\n", capsys.readouterr().out
    )
    assert float(str(read_progress(environment)["tokensPerSecond"])) > 0


def reader_of(*paths: Path) -> RecordReader:
    files = tuple(DataFile(path, path.name) for path in paths)
    return RecordReader(
        [OpenDataset("datasets[0]", DatasetSource(uri="data"), files, 1.0, 0.0)]
    )


def test_total_is_estimated_from_the_bytes_read(tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": "x" * 1000}] * 500)
        for name in "ab"
    ]
    reader = reader_of(*files)
    records = reader.read()
    assert reader.estimated_total(0) is None
    for _ in range(600):
        next(records)
    assert reader.estimated_total(600) == pytest.approx(1000, rel=0.35)
    assert sum(1 for _ in records) == 400
    assert reader.estimated_total(1000) is None


def test_full_disk_is_reported_with_the_folder(
    model: Path, environment: Environment, data: Path
) -> None:
    write_jsonl(data, [{"text": "the file"}])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, limits[1]))
    try:
        message, code = run_to_failure(
            prepare_config(model, context_length=131072), environment
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert code == ExitCode.UNAVAILABLE
    assert str(environment.workspace) in message
    assert "File too large" in message
    assert not output_folder(environment).exists()


def test_model_without_a_tokenizer_is_rejected(
    tmp_path: Path, environment: Environment, data: Path
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_jsonl(data, [{"text": "the file"}])

    message, code = run_to_failure(prepare_config(tmp_path / "bare"), environment)
    assert code == ExitCode.CONFIG
    assert "tokenizer" in message


def test_missing_data_set_is_reported(model: Path, environment: Environment) -> None:
    message, code = run_in_process(prepare_config(model, "nothing.jsonl"), environment)

    assert code == ExitCode.NOT_FOUND
    assert message.failure
    assert "nothing.jsonl" in message.failure.message
