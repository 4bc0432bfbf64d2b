"""Prepare that is killed: it goes on behind its last complete part and ends in the same bytes."""

import gzip
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import formats
from support.forkserver import ForkServer
from support.formats import Write, write_parquet
from support.models import write_jsonl
from support.prepared import IDENTITY, make_tokenizer, output_folder, prepare, prepare_config
from support.stages import environment_in, read_termination_message, run_in_process

from finetune_trainer.contract import Environment, ExitCode, PrepareConfig, PrepareResult
from finetune_trainer.data.encoding import Encoder
from finetune_trainer.data.parts import PartFolder

SMALL = {
    "record_batches.BATCH_RECORDS": 20,
    "record_packer.PART_TOKENS": 400,
    "record_packer.PART_ROWS": 1,
}
RECORDS = 3000
INVALID = {"max_invalid_fraction": 0.5}


def records(count: int = RECORDS) -> list[dict[str, object]]:
    """Return numbered records; every tenth is invalid."""
    return [
        {"text": f"{number} opens the file" if number % 10 else None} for number in range(count)
    ]


def state_folder(environment: Environment) -> Path:
    return environment.stage_dir("prepare", IDENTITY) / "partial"


def complete_records(environment: Environment) -> int:
    """Return the number of records in complete parts."""
    states = sorted(state_folder(environment).glob("part-*.json"))
    return json.loads(states[-1].read_text())["counts"]["records"] if states else 0


def output_bytes(environment: Environment) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output_folder(environment).iterdir())}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


class Attempts:
    """Attempts of the stage as real processes, in a workspace of their own."""

    def __init__(self, server: ForkServer, config: PrepareConfig, folder: Path) -> None:
        self.environment = environment_in(folder)
        self._server, self._folder, self._config = server, folder, config
        self.tokenized: list[list[int]] = []
        """The numbers of the records that each attempt tokenized."""
        self.complete_before: list[int] = []
        """The records in complete parts when each attempt began."""

    def start(self) -> Any:
        self.complete_before.append(complete_records(self.environment))
        (self._folder / "tokenized").unlink(missing_ok=True)
        constants = {f"finetune_trainer.data.{name}": value for name, value in SMALL.items()}
        log, tokenized = self._folder / "log", self._folder / "tokenized"
        return self._server.start(
            self._config, self.environment, log, constants=constants, tokenized=str(tokenized)
        )

    def wait(self, process: Any) -> int:
        code = process.wait()
        self.tokenized.append(
            [int(number[0]) for line in self.lines() if (number := re.search(r"\d+", line))]
        )
        return code

    def lines(self) -> list[str]:
        """Return the texts that the newest attempt has tokenized."""
        log = self._folder / "tokenized"
        return log.read_text().splitlines() if log.exists() else []

    def result(self) -> PrepareResult:
        result = read_termination_message(self.environment).result
        assert isinstance(result, PrepareResult)
        return result


SEVERAL = [
    {"uri": "rows-*.jsonl"},
    {"uri": "rows.jsonl.gz", "weight": 1.5},
    {"uri": "rows.parquet", "columns": {"text": "body"}, "weight": 0.5},
    {"uri": "chat.jsonl.zst"},
]
"""Data sets of 3000 records together, in several files, formats and shapes."""


def write_several(folder: Path) -> None:
    """Write the files of SEVERAL."""
    rows = records()
    write_jsonl(folder / "rows-1.jsonl", rows[:500])
    write_jsonl(folder / "rows-2.jsonl", rows[500:1000])
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines(rows[1000:2000]), mtime=0))
    write_parquet(folder / "rows.parquet", [{"body": row["text"]} for row in rows[2000:2600]])
    chat = [{"messages": [{"role": "assistant", "content": row["text"]}]} for row in rows[2600:]]
    (folder / "chat.jsonl.zst").write_bytes(pa.compress(lines(chat), "zstd", asbytes=True))


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("datasets", [None, SEVERAL], ids=["one", "several"])
def test_random_kills_change_neither_bytes_nor_result(
    server: ForkServer,
    tokenizer_folder: Path,
    tmp_path: Path,
    datasets: list[dict[str, Any]] | None,
) -> None:
    config = prepare_config(tokenizer_folder, datasets=datasets, validation_fraction=0.2, **INVALID)
    once, killed = (Attempts(server, config, tmp_path / name) for name in ("once", "killed"))
    for attempts in (once, killed):
        assert attempts.environment.manifest_dir
        write_jsonl(attempts.environment.manifest_dir / "data.jsonl", records())
        write_several(attempts.environment.manifest_dir)
    assert once.wait(once.start()) == ExitCode.DONE

    moments = random.Random(7)
    code, kills = None, 0
    while code != ExitCode.DONE:
        process = killed.start()
        # The last attempts are not killed, so that one of them begins with complete parts and ends.
        if kills < 8 and killed.complete_before[-1] < RECORDS * 0.8:
            most = moments.randrange(RECORDS // 3)
            process.until(lambda most=most: len(killed.lines()) > most)
            process.kill(signal.SIGKILL)
            kills += 1
        code = killed.wait(process)

    assert kills >= 2
    assert killed.complete_before[-1] > 0
    for first, tokenized in zip(killed.complete_before, killed.tokenized, strict=True):
        assert min(tokenized, default=first) >= first
    assert len(killed.tokenized[-1]) < RECORDS * 0.9
    assert output_bytes(killed.environment) == output_bytes(once.environment)
    assert killed.result() == once.result()
    result = once.result()
    assert (result.records, result.invalid) == (RECORDS, 268 if datasets else RECORDS // 10)
    assert not state_folder(killed.environment).exists()


@pytest.mark.usefixtures("small_parts")
def test_several_data_sets_resume_wherever_they_were_stopped(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stops are in every file, and between them."""
    config = prepare_config(tokenizer_folder, datasets=SEVERAL, validation_fraction=0.2, **INVALID)
    expected, continued, stops = None, 0, (12, 25, 40, 55, 70, 85, 100, 110)
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
@pytest.mark.parametrize("change", ["edited", "removed", "added at the end", "added between"])
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
                write_jsonl(folder / "rows-2.jsonl", [*records(99), {"text": "99 opens the lock"}])
            case "removed":
                (folder / "rows-2.jsonl").unlink()
            case "added at the end":
                write_jsonl(folder / "rows-5.jsonl", records(500)[400:])
            case _:
                write_jsonl(folder / "rows-3.jsonl", records(500)[400:])
    result = prepare(config, environment)

    kept = change == "added at the end"
    assert ("continuing after record" in (log := capsys.readouterr().out)) == kept
    assert ("has changed since an earlier attempt wrote" in log) != kept
    other = environment_in(tmp_path / "fresh")
    assert (result, output_bytes(environment)) == (prepare(config, other), output_bytes(other))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write texts; an invalid one is blank, because a cell of CSV cannot be null."""
    path.write_text("text\n" + "".join(f"{row['text'] or ' '}\n" for row in rows))


FORMATS: dict[str, Write] = formats.FORMATS | {"csv": write_csv}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(f"finetune_trainer.data.{name}", value)


def fail_after(batches: int, config: Any, environment: Environment) -> int:
    """Run the stage until so many batches are tokenized, then fail; return the records in complete parts."""
    encode, count = Encoder.encode, iter(range(batches))

    def failing(self: Encoder, examples: Any) -> Any:
        if next(count, None) is None:
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
    config = prepare_config(tokenizer_folder, f"data.{name}", packing=packing, **INVALID)
    FORMATS[name](manifest_dir / f"data.{name}", records(400))
    fail_after(12, config, environment)
    result = prepare(config, environment)

    assert (result, output_bytes(environment)) == fresh(config, records(400), tmp_path / "fresh")


@pytest.mark.usefixtures("small_parts")
def test_appended_records_do_not_repeat_complete_parts(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first buffer of the file must be behind the part, so the records are long."""
    config = prepare_config(tokenizer_folder, **INVALID)
    long: list[dict[str, object]] = [row | {"more": "x" * 2000} for row in records(400)]
    write_jsonl(manifest_dir / "data.jsonl", long[:350])
    complete = fail_after(12, config, environment)
    write_jsonl(manifest_dir / "data.jsonl", long)
    result = prepare(config, environment)

    assert f"continuing after record {complete}" in capsys.readouterr().out
    assert (result, output_bytes(environment)) == fresh(config, long, tmp_path / "fresh")


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

    assert f"data.{name} has changed since an earlier attempt wrote" in capsys.readouterr().out
    assert (result, output_bytes(environment)) == fresh(config, changed, tmp_path / "fresh")


@pytest.mark.usefixtures("small_parts")
def test_changed_tokenizer_begins_anew(
    environment: Environment, manifest_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    make_tokenizer(model)
    config = prepare_config(model, **INVALID)
    write_jsonl(manifest_dir / "data.jsonl", records(400))
    fail_after(12, config, environment)
    make_tokenizer(model, writes_bos=True)
    result = prepare(config, environment)

    assert "continuing" not in capsys.readouterr().out
    assert (result, output_bytes(environment)) == fresh(config, records(400), tmp_path / "fresh")


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

    assert (result, output_bytes(environment)) == fresh(config, records(400), tmp_path / "fresh")


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
        assert run_in_process(config, environment)[1] == ExitCode.UNAVAILABLE
    assert output_folder(environment).exists()

    complete = complete_records(environment)
    tokenized: list[str] = []
    encode = Encoder.encode
    monkeypatch.setattr(
        Encoder,
        "encode",
        lambda self, texts: encode(self, tokenized.extend(each.text for each in texts) or texts),
    )
    result = prepare(config, environment)
    assert min((int(text.split()[0]) for text in tokenized), default=complete) >= complete > 300
    assert (result, output_bytes(environment)) == fresh(config, records(400), tmp_path / "fresh")


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
    states = sorted(path.name for path in state_folder(environment).glob("part-*.json"))
    folder = PartFolder(state_folder(environment), config.recipe.context_length, "")
    unlink, count = Path.unlink, iter(range(3))

    def killed(path: Path) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.delete()
    assert (
        sorted(path.name for path in state_folder(environment).glob("part-*.json")) == states[:-3]
    )


@pytest.mark.usefixtures("small_parts")
def test_unusable_data_leaves_no_parts(
    tokenizer_folder: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", records(400))
    _, code = run_in_process(prepare_config(tokenizer_folder), environment)

    assert code == ExitCode.DATA
    assert not state_folder(environment).exists()
