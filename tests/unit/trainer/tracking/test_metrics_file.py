import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from finetune_trainer.contract.metric_rows import read_rows
from finetune_trainer.files import write_durably
from finetune_trainer.tracking import appended_file
from finetune_trainer.tracking.metrics_file import MetricsFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def written(path, steps, **values):
    file = MetricsFile(path)
    file.open(0)
    for step in range(1, steps + 1):
        file.record(step, {"loss": 1 / step, **values})
    return file


def test_recorded_rows_are_in_the_file_without_closing_it(path):
    written(path, 3)
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [
        1,
        0.5,
        1 / 3,
    ]


@pytest.mark.parametrize("lost", [2, 9, 30, 50])
def test_torn_last_line_is_dropped(path, lost):
    written(path, 3)
    assert lost < len(path.read_bytes().splitlines()[-1])
    path.write_bytes(path.read_bytes()[:-lost])
    assert [row.step for row in read_rows(path)] == [1, 2]


def test_row_recorded_after_a_torn_line_is_readable(path):
    written(path, 3)
    path.write_bytes(path.read_bytes()[:-5])
    file = MetricsFile(path)
    file.open(2)
    file.record(3, {"loss": 7.0})
    assert [row.values["loss"] for row in read_rows(path)] == [1, 0.5, 7.0]


def test_resume_removes_rows_after_the_step_from_the_disk(path):
    written(path, 9)
    MetricsFile(path).open(4)
    assert [row.step for row in read_rows(path)] == [1, 2, 3, 4]


def test_repeated_value_of_a_kept_step_stays_as_it_was_first(path):
    written(path, 2).record(2, {"validation_loss": 0.25})
    first = read_rows(path)
    file = MetricsFile(path)
    file.open(2)
    file.record(2, {"validation_loss": 0.5})
    assert read_rows(path) == first


def test_closed_file_has_one_line_for_each_step(path):
    file = written(path, 2)
    file.record(2, {"validation_loss": 0.25})
    before = read_rows(path)
    file.close()
    assert len(path.read_text().splitlines()) == 2
    assert read_rows(path) == before


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "null",
        '{"step": 2}',
        '{"step": "x", "time": 1}',
        '{"step": 2, "time": null}',
        "\x00",
        '"step"',
    ],
)
def test_line_that_is_no_row_is_left_out(path, line):
    written(path, 1)
    with path.open("a") as file:
        file.write(f"{line}\n" + '{"step": 3, "time": 5, "loss": 1.5, "note": "x"}\n')
    assert [(row.step, row.values) for row in read_rows(path)] == [
        (1, {"loss": 1.0}),
        (3, {"loss": 1.5}),
    ]


def test_unwritable_file_is_logged_once_and_rows_stay_in_memory(path, capsys):
    path.mkdir()
    file = written(path, 3)
    file.sync()
    file.try_again()
    file.close()
    assert len(file.rows()) == 3
    assert capsys.readouterr().out.count("cannot be written") == 1


@pytest.fixture
def after_a_full_disk(path, monkeypatch):
    """A file whose second row could not be made durable, and whose third was not written; the disk has room again."""
    file = written(path, 1)
    with monkeypatch.context() as full:
        full.setattr(
            os,
            "fsync",
            lambda _: (_ for _ in ()).throw(
                OSError(errno.ENOSPC, "No space left on device")
            ),
        )
        file.record(2, {"loss": 0.5})
        file.sync()
        file.record(3, {"loss": 0.25})
    assert [row.step for row in read_rows(path)] == [1, 2]
    return file


def test_file_has_every_row_after_a_full_disk_has_room(after_a_full_disk, path, capsys):
    after_a_full_disk.try_again()
    after_a_full_disk.record(4, {"loss": 0.125})
    assert [(row.step, row.values["loss"]) for row in read_rows(path)] == [
        (1, 1),
        (2, 0.5),
        (3, 0.25),
        (4, 0.125),
    ]
    assert "metrics.jsonl is written again" in capsys.readouterr().out


def test_closing_writes_the_rows_that_a_full_disk_refused(after_a_full_disk, path):
    after_a_full_disk.close()
    assert [row.step for row in read_rows(path)] == [1, 2, 3]


def test_closing_a_file_never_opened_keeps_it(path):
    written(path, 2).close()
    MetricsFile(path).close()
    assert [row.step for row in read_rows(path)] == [1, 2]


def test_rows_are_recorded_while_another_thread_syncs(path, monkeypatch):
    begun = threading.Event()
    released = threading.Event()
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        begun.set()
        assert released.wait(20)
        fsync(descriptor)

    file = written(path, 1)
    monkeypatch.setattr(os, "fsync", slow_fsync)
    with ThreadPoolExecutor() as pool:
        syncing = pool.submit(file.sync)
        assert begun.wait(20)
        file.record(2, {"loss": 0.5})
        assert [row.step for row in read_rows(path)] == [1, 2]
        closing = pool.submit(file.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)  # not before the fsync has returned
        released.set()
        syncing.result(20)
        closing.result(20)
    file.sync()  # of a closed file: nothing
    assert [row.step for row in read_rows(path)] == [1, 2]


def test_sync_during_close_returns_when_the_rows_are_durable(path, monkeypatch):
    begun = threading.Event()
    released = threading.Event()

    def slow_write(*arguments: Any) -> None:
        begun.set()
        assert released.wait(20)
        write_durably(*arguments)

    file = written(path, 1)
    monkeypatch.setattr(appended_file, "write_durably", slow_write)
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(file.close)
        assert begun.wait(20)
        syncing = pool.submit(file.sync)
        with pytest.raises(TimeoutError):
            syncing.result(0.1)
        released.set()
        syncing.result(20)
        closing.result(20)
