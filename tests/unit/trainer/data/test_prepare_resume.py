"""Prepare that has failed: it continues after its last complete part and ends in the same bytes."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.trainer import formats
from support.trainer.formats import Write
from support.trainer.models import write_jsonl
from support.trainer.prepare_parts import (
    SEVERAL,
    SMALL,
    complete_records,
    output_bytes,
    records,
    state_files,
    state_folder,
    write_several,
)
from support.trainer.prepared import (
    make_tokenizer,
    output_folder,
    prepare,
    prepare_config,
)
from support.trainer.stages import environment_in, run_in_process

from finetune_trainer.contract import Environment, ExitCode, PrepareResult
from finetune_trainer.data.packing.parts import PartFolder
from finetune_trainer.data.tokenizing.encoder import Encoder

INVALID: dict[str, Any] = {"max_invalid_fraction": 0.5}


@pytest.mark.usefixtures("small_parts")
def test_several_data_sets_resume_wherever_they_were_stopped(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stops are in every file, and between them."""
    config = prepare_config(
        tokenizer_folder, datasets=SEVERAL, validation_fraction=0.2, **INVALID
    )
    expected = None
    continued = 0
    stops = (12, 25, 40, 55, 70, 85, 100, 110)
    for batches in (None, *stops):
        environment = environment_in(tmp_path / f"{batches}")
        assert environment.manifest_dir
        write_several(environment.manifest_dir)
        if batches:
            fail_after(batches, config, environment)
        result = prepare(config, environment), output_bytes(environment)
        expected = expected or result
        assert result == expected
        continued += "continuing after record" in capsys.readouterr().out
    assert continued == len(stops)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "change", ["edited", "removed", "added at the end", "added between"]
)
def test_only_files_that_were_read_must_be_the_same(
    *,
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    config = prepare_config(tokenizer_folder, "rows-*.jsonl", **INVALID)
    for folder in (manifest_dir, tmp_path / "fresh" / "manifest"):
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "rows-2.jsonl", records(100))
        write_jsonl(folder / "rows-4.jsonl", records(400)[100:])
    fail_after(12, config, environment)
    for folder in (manifest_dir, tmp_path / "fresh" / "manifest"):
        match change:
            case "edited":
                write_jsonl(
                    folder / "rows-2.jsonl",
                    [*records(99), {"text": "99 opens the lock"}],
                )
            case "removed":
                (folder / "rows-2.jsonl").unlink()
            case "added at the end":
                write_jsonl(folder / "rows-5.jsonl", records(500)[400:])
            case _:
                write_jsonl(folder / "rows-3.jsonl", records(500)[400:])
    result = prepare(config, environment)

    kept = change == "added at the end"
    log = capsys.readouterr().out
    assert ("continuing after record" in log) == kept
    assert ("has changed since an earlier attempt wrote" in log) != kept
    other = environment_in(tmp_path / "fresh")
    assert result == prepare(config, other)
    assert output_bytes(environment) == output_bytes(other)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write texts; an invalid text is blank, because a cell of CSV cannot be null."""
    cells = [row["text"] or " " for row in rows]
    path.write_text("".join(f"{cell}\n" for cell in ["text", *cells]))


FORMATS: dict[str, Write] = formats.FORMATS | {"csv": write_csv}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(f"finetune_trainer.data.{name}", value)


def fail_after(batches: int, config: Any, environment: Environment) -> int:
    """Run the stage until so many batches are tokenized, then fail; return the records in complete parts."""
    encode = Encoder.encode
    calls = count()

    def failing(self: Encoder, examples: Any) -> Any:
        if next(calls) >= batches:
            raise OSError(28, "No space left on device")
        return encode(self, examples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "encode", failing)
        _, code = run_in_process(config, environment)
    assert code == ExitCode.UNAVAILABLE
    complete = complete_records(environment)
    assert complete > 0
    return complete


def fresh(
    config: Any, rows: list[dict[str, Any]], folder: Path
) -> tuple[PrepareResult, dict[str, bytes]]:
    """Return the result and the output of an attempt that nothing disturbs."""
    environment = environment_in(folder)
    assert environment.manifest_dir
    name = config.datasets[0].uri
    FORMATS[name.rpartition(".")[2]](environment.manifest_dir / name, rows)
    return prepare(config, environment), output_bytes(environment)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packing", [True, False])
def test_every_format_resumes_with_the_same_bytes(
    *,
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    name: str,
    packing: bool,
) -> None:
    config = prepare_config(
        tokenizer_folder, f"data.{name}", packing=packing, **INVALID
    )
    FORMATS[name](manifest_dir / f"data.{name}", records(400))
    fail_after(12, config, environment)
    result = prepare(config, environment)

    assert (result, output_bytes(environment)) == fresh(
        config, records(400), tmp_path / "fresh"
    )


@pytest.mark.usefixtures("small_parts")
def test_appended_records_do_not_repeat_complete_parts(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The part must end after the first buffer of the file, so the records are long."""
    config = prepare_config(tokenizer_folder, unrendered="Warn", **INVALID)
    long: list[dict[str, object]] = [row | {"more": "x" * 2000} for row in records(400)]
    write_jsonl(manifest_dir / "data.jsonl", long[:350])
    complete = fail_after(12, config, environment)
    write_jsonl(manifest_dir / "data.jsonl", long)
    result = prepare(config, environment)

    assert f"continuing after record {complete}" in capsys.readouterr().out
    assert (result, output_bytes(environment)) == fresh(
        config, long, tmp_path / "fresh"
    )


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", FORMATS)
def test_changed_source_begins_anew(
    *,
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    config = prepare_config(tokenizer_folder, f"data.{name}", **INVALID)
    FORMATS[name](manifest_dir / f"data.{name}", records(400))
    fail_after(12, config, environment)
    changed = records(400)
    changed[1] = {"text": "1 opens the lock"}
    FORMATS[name](manifest_dir / f"data.{name}", changed)
    result = prepare(config, environment)

    assert (
        f"data.{name} has changed since an earlier attempt wrote"
        in capsys.readouterr().out
    )
    assert (result, output_bytes(environment)) == fresh(
        config, changed, tmp_path / "fresh"
    )


@pytest.mark.usefixtures("small_parts")
def test_changed_tokenizer_begins_anew(
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    make_tokenizer(model)
    config = prepare_config(model, **INVALID)
    write_jsonl(manifest_dir / "data.jsonl", records(400))
    fail_after(12, config, environment)
    make_tokenizer(model, writes_bos=True)
    result = prepare(config, environment)

    assert "continuing" not in capsys.readouterr().out
    assert (result, output_bytes(environment)) == fresh(
        config, records(400), tmp_path / "fresh"
    )


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_parts_behind_a_damaged_one_are_repeated(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    damage: str,
) -> None:
    config = prepare_config(tokenizer_folder, **INVALID)
    write_jsonl(manifest_dir / "data.jsonl", records(400))
    fail_after(12, config, environment)
    rows = state_folder(environment) / "rows" / "train-00001.rows"
    rows.write_bytes(rows.read_bytes()[:-1])
    if damage == "missing":
        rows.unlink()
    result = prepare(config, environment)

    assert (result, output_bytes(environment)) == fresh(
        config, records(400), tmp_path / "fresh"
    )


@pytest.mark.usefixtures("small_parts")
def test_rows_without_a_result_are_not_tokenized_again(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may die between publishing the rows and writing its result."""
    config = prepare_config(tokenizer_folder, **INVALID)
    write_jsonl(manifest_dir / "data.jsonl", records(400))

    def die(_: PartFolder) -> None:
        raise OSError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartFolder, "delete", die)
        _, code = run_in_process(config, environment)
    assert code == ExitCode.UNAVAILABLE
    assert output_folder(environment).exists()

    complete = complete_records(environment)
    tokenized: list[int] = []
    encode = Encoder.encode

    def recording(self: Encoder, examples: Any) -> Any:
        for example in examples:
            number, _, _ = example.text.partition(" ")
            tokenized.append(int(number))
        return encode(self, examples)

    monkeypatch.setattr(Encoder, "encode", recording)
    result = prepare(config, environment)
    assert min(tokenized, default=complete) >= complete > 300
    assert (result, output_bytes(environment)) == fresh(
        config, records(400), tmp_path / "fresh"
    )


@pytest.mark.usefixtures("small_parts")
def test_kill_while_parts_are_deleted_keeps_the_first_ones(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = prepare_config(tokenizer_folder, **INVALID)
    write_jsonl(manifest_dir / "data.jsonl", records(400))
    fail_after(12, config, environment)
    states = state_files(environment)
    folder = PartFolder(state_folder(environment), config.recipe.context_length, "")
    unlink = Path.unlink
    calls = count()

    def killed(path: Path) -> None:
        if next(calls) >= 3:
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.delete()
    assert state_files(environment) == states[:-3]


@pytest.mark.usefixtures("small_parts")
def test_unusable_data_leaves_no_parts(
    tokenizer_folder: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", records(400))
    _, code = run_in_process(prepare_config(tokenizer_folder), environment)

    assert code == ExitCode.DATA
    assert not state_folder(environment).exists()
