"""Prepare that tokenizes in several processes: the same bytes, messages and counts, whatever happens to them."""

import json
import signal
import time
from collections.abc import Callable
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.trainer.forkserver import ForkedStage, ForkServer
from support.trainer.models import prompt_records, write_jsonl
from support.trainer.prepare_parts import SMALL, output_bytes, state_files
from support.trainer.prepared import IDENTITY, make_tokenizer, prepare, prepare_config
from support.trainer.stages import environment_in, run_in_process
from support.trainer.training import stop_code

from finetune_trainer.contract import Environment, ExitCode, PrepareRecipe
from finetune_trainer.data.tokenizing import batch_tokenizer
from finetune_trainer.data.tokenizing.messages import records_message, settings_message
from finetune_trainer.data.tokenizing.record_tokenizer import (
    RecordTokenizer,
    TokenizerSettings,
)
from finetune_trainer.data.tokenizing.worker_pool import WorkerPool
from finetune_trainer.models.tokenizer import load_tokenizer
from finetune_trainer.runtime.errors import ServiceUnavailable

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
INVALID: dict[str, Any] = {"max_invalid_fraction": 0.9}


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Tokenize in that many processes from the first batch whose shape is known, and in small batches and parts."""
    for name, value in SMALL.items():
        monkeypatch.setattr(f"finetune_trainer.data.{name}", value)
    monkeypatch.setattr(batch_tokenizer, "POOL_CHARACTERS", 0)
    monkeypatch.setattr(
        WorkerPool, "is_ready", property(lambda pool: pool._ready.wait(60))
    )
    return lambda count: monkeypatch.setattr(
        batch_tokenizer, "usable_processors", lambda: count
    )


def two_environments(folder: Path, records: int) -> tuple[Environment, Environment]:
    """Return two environments with the same data: for a stage that runs once, and for a stage that is killed."""
    once = environment_in(folder / "once")
    killed = environment_in(folder / "killed")
    rows: list[dict[str, object]] = [
        {"text": f"{number} opens the file"} for number in range(records)
    ]
    for environment in (once, killed):
        assert environment.manifest_dir
        write_jsonl(environment.manifest_dir / "data.jsonl", rows)
    return once, killed


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The batches that other processes received."""
    batches: list[bytes] = []
    submit = WorkerPool.submit

    def recording(pool: WorkerPool, records: bytes) -> Any:
        batches.append(records)
        return submit(pool, records)

    monkeypatch.setattr(WorkerPool, "submit", recording)
    return batches


MIXED: list[dict[str, Any]] = [
    {"uri": "chat.jsonl", "weight": 1.5},
    {"uri": "prompts.jsonl", "weight": 0.7},
    {"uri": "texts.parquet"},
    {"uri": "one.jsonl", "weight": 2},
]


def write_mixed(folder: Path) -> None:
    """Write the data sets of MIXED: a tenth of their records is invalid."""
    chat: list[dict[str, object]] = [
        {
            "messages": [
                {"role": "user", "content": f"{number} é€?"},
                {
                    "role": "assistant",
                    "content": f"the file {number}" if number % 10 else " ",
                },
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": "a socket 🙂"},
            ]
        }
        for number in range(300)
    ]
    write_jsonl(folder / "chat.jsonl", chat)
    prompts = prompt_records(300)
    prompts[7::10] = [{"prompt": "half a character: \ud83d", "completion": " x"}] * 30
    prompts[150] = {"prompt": "the file " * 100, "completion": " opens", "more": 1}
    write_jsonl(folder / "prompts.jsonl", prompts)
    texts = [
        {"text": f"line {number} of the file" if number % 10 else ""}
        for number in range(300)
    ]
    parquet.write_table(pa.Table.from_pylist(texts), folder / "texts.parquet")
    write_jsonl(folder / "one.jsonl", [{"text": "one line"}])


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("packing", [True, False])
def test_bytes_do_not_depend_on_the_number_of_processes(
    *,
    tmp_path: Path,
    in_processes: Callable[[int], None],
    handed_over: list[bytes],
    packing: bool,
) -> None:
    make_tokenizer(tmp_path / "model", chat_template=CHATML, writes_bos=True)
    config = prepare_config(
        tmp_path / "model",
        datasets=MIXED,
        packing=packing,
        validation_fraction=0.2,
        context_length=64,
        **INVALID,
    )
    outcomes = []
    for process_count in (1, 2, 4):
        in_processes(process_count)
        environment = environment_in(tmp_path / f"{process_count}")
        assert environment.manifest_dir
        write_mixed(environment.manifest_dir)
        outcomes.append((prepare(config, environment), output_bytes(environment)))
        assert bool(handed_over) == (process_count > 1)
        handed_over.clear()

    assert outcomes[0] == outcomes[1] == outcomes[2]
    result, _ = outcomes[0]
    assert result.records == 901
    assert 60 < result.invalid < 100
    assert result.truncated > 100
    assert result.dropped == 1


def write_wrong_records(folder: Path) -> None:
    rows: list[dict[str, object]] = [
        {"text": f"line {number}"} for number in range(200)
    ]
    rows[90:97] = [
        {"text": 3},
        {"text": "\udc80"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "text": None},
        {"words": {"more": 1}},
        {"text": " "},
        {"text": "x", "messages": [], "more": [1]},
    ]
    rows[100:140] = [
        {"prompt": "a", "completion": "b"}
    ] * 40  # whole batches of another shape
    write_jsonl(folder / "data.jsonl", rows)
    with (folder / "data.jsonl").open("a") as file:
        file.write('{"text": \n')


def write_dates(folder: Path) -> None:
    """Write values that no message can hold."""
    rows = [{"text": date(2024, 7, 26)} for _ in range(100)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    write_jsonl(folder / "first.jsonl", [{"text": "line"}] * 30)


def write_broken_array(folder: Path) -> None:
    """Write a file that is found to be no JSON only when most of it has been read."""
    rows = [
        json.dumps({"text": f"line {number}" if number % 50 else 3})
        for number in range(300)
    ]
    (folder / "data.json").write_text("[" + ",\n".join(rows) + ",\n}")


WRONG: dict[Callable[[Path], None], str] = {
    write_wrong_records: "data.jsonl",
    write_dates: "data.parquet",
    write_broken_array: "data.json",
}


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("write", WRONG)
def test_messages_do_not_depend_on_the_number_of_processes(
    *,
    tokenizer_folder: Path,
    tmp_path: Path,
    in_processes: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
) -> None:
    config = prepare_config(tokenizer_folder, WRONG[write])
    outcomes = []
    for process_count in (1, 3):
        in_processes(process_count)
        environment = environment_in(tmp_path / f"{process_count}")
        assert environment.manifest_dir
        write(environment.manifest_dir)
        message, code = run_in_process(config, environment)
        parts = [path.name for path in state_files(environment)]
        lines = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("data.")
        ]
        outcomes.append((message.failure, code, parts, lines))

    assert outcomes[0] == outcomes[1]
    failure, code, _, lines = outcomes[0]
    assert failure
    assert code == ExitCode.DATA
    assert lines


@pytest.mark.usefixtures("in_processes")
def test_template_that_fails_in_a_process_refuses_the_records(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    in_processes: Callable[[int], None],
) -> None:
    """The template divides by zero: an error of Python, which no other process may end with."""
    make_tokenizer(
        manifest_dir / "model",
        chat_template="{{ 1 / (messages | length - 1) }}{{ messages[0].content }}",
    )
    rows: list[dict[str, object]] = [
        {"messages": [{"role": "assistant", "content": f"line {n}"}]}
        for n in range(100)
    ]
    write_jsonl(manifest_dir / "data.jsonl", rows)
    in_processes(2)
    message, code = run_in_process(prepare_config(manifest_dir / "model"), environment)
    assert message.failure
    assert code == ExitCode.DATA
    reason = "the chat template rejected the conversation"
    assert f"100 \N{MULTIPLICATION SIGN}: {reason}" in message.failure.message


@pytest.mark.usefixtures("in_processes")
def test_killed_process_is_retried_from_its_last_part(
    *,
    tokenizer_folder: Path,
    tmp_path: Path,
    in_processes: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = prepare_config(tokenizer_folder)
    once, killed = two_environments(tmp_path, 2000)
    in_processes(1)
    expected = prepare(config, once)

    in_processes(2)
    submit = WorkerPool.submit
    batches = count()

    def submit_and_kill(pool: WorkerPool, records: bytes) -> Any:
        if next(batches) >= 50:
            pool._processes[1].kill()
        return submit(pool, records)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "submit", submit_and_kill)
        message, code = run_in_process(config, killed)
    assert code == ExitCode.UNAVAILABLE
    assert message.failure
    assert "a process that tokenizes was killed by SIGKILL" in message.failure.message
    assert "raise prepare.pod.resources.limits.memory" in message.failure.message

    assert prepare(config, killed) == expected
    assert "prepare: continuing after record" in capsys.readouterr().out
    assert output_bytes(killed) == output_bytes(once)


def test_pool_closes_if_a_message_was_not_sent() -> None:
    """The message is larger than a pipe, and the process was killed before it read any of it."""
    pool = WorkerPool(1, b"settings")
    pool._processes[0].kill()
    pool._processes[0].wait()
    with pytest.raises(ServiceUnavailable, match="was killed by SIGKILL"):
        pool.submit(bytes(1 << 20)).result()
    pool.close()
    assert not pool._processes[0].stdin or pool._processes[0].stdin.closed


def test_process_needs_no_torch(tokenizer_folder: Path) -> None:

    tokenizer = load_tokenizer("file:///model", tokenizer_folder)
    recipe = PrepareRecipe(context_length=64)
    pool = WorkerPool(1, settings_message(TokenizerSettings.of(tokenizer), recipe))
    try:
        records: list[dict[str, Any]] = [{"text": "the file 🙂"}, {"text": 3}]
        message = records_message(records, "text")
        assert message
        batch = pool.submit(message).result(60)
        libraries = Path(f"/proc/{pool._processes[0].pid}/maps").read_text()
    finally:
        pool.close()

    assert batch
    expected = RecordTokenizer(tokenizer, recipe).tokenize(records, "text")
    assert [type(outcome) for outcome in batch.outcomes] == [tuple, str]
    tokenized = batch.outcomes[0]
    alone = expected.outcomes[0]
    assert isinstance(tokenized, tuple)
    assert isinstance(alone, tuple)
    [document] = tokenized
    [expected_document] = alone
    assert document.tokens.tolist() == expected_document.tokens.tolist()
    assert document.loss_mask.tolist() == expected_document.loss_mask.tolist()
    assert batch.outcomes[1] == expected.outcomes[1]
    assert "tokenizers" in libraries
    assert "libtorch" not in libraries


def children(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def is_running(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_killed_stage(
    fork_server: ForkServer,
    tokenizer_folder: Path,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    config = prepare_config(tokenizer_folder)
    once, killed = two_environments(tmp_path, 6000)
    constants = {
        f"finetune_trainer.data.{name}": value for name, value in SMALL.items()
    }

    def start(environment: Environment) -> ForkedStage:
        return fork_server.start(
            config, environment, tmp_path / "log", constants=constants, processes=2
        )

    parts = killed.stage_dir("prepare", IDENTITY) / "partial"
    stage = start(killed)
    assert stage.until(lambda: len(list(parts.glob("part-*.json"))) >= 3, 60)
    workers = children(stage.pid)
    began = time.monotonic()
    stage.kill(number)
    code = stage.wait()
    assert time.monotonic() - began < 2
    assert code == stop_code(number)
    assert len(workers) == 2
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() - began < 5
        time.sleep(0.01)

    stage = start(killed)
    assert stage.wait() == ExitCode.DONE
    assert "continuing after record" in (tmp_path / "log").read_text()
    assert start(once).wait() == ExitCode.DONE
    assert output_bytes(killed) == output_bytes(once)
