"""Fencing: an attempt that was frozen and replaced publishes nothing when it wakes up."""

import os
import threading
from pathlib import Path

import pytest

from finetune_trainer.contract import ExitCode
from finetune_trainer.files import write_durably
from finetune_trainer.runtime import artifacts, fence
from finetune_trainer.runtime.errors import Replaced
from finetune_trainer.runtime.fence import Attempt, Fence, SilentHolder, take_token
from finetune_trainer.runtime.stage_folder import exclusive

FIRST = Attempt("p", 1)
SECOND = Attempt("p", 2)


# ---- tokens


def tokens_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".attempts").iterdir())


def test_later_attempt_takes_over_and_the_earlier_one_is_told(tmp_path: Path) -> None:
    first = take_token(tmp_path, FIRST)
    first.check()
    second = take_token(tmp_path, SECOND)
    second.check()
    with pytest.raises(
        Replaced,
        match=r"^attempt 1 was replaced by attempt 2: it ends and publishes nothing$",
    ):
        first.check()
    assert Replaced.exit_code == ExitCode.INTERRUPTED
    assert tokens_in(tmp_path) == ["00000002"]


def test_earlier_attempt_gets_no_token_after_a_later_one(tmp_path: Path) -> None:
    take_token(tmp_path, SECOND).check()
    with pytest.raises(Replaced, match="attempt 1 was replaced by attempt 2"):
        take_token(tmp_path, FIRST)
    assert tokens_in(tmp_path) == ["00000001"]


def test_attempt_of_another_pipeline_takes_over(tmp_path: Path) -> None:
    """A pipeline that was deleted and created again counts its attempts anew."""
    third = take_token(tmp_path, Attempt("p", 3))
    take_token(tmp_path, Attempt("q", 1)).check()
    with pytest.raises(
        Replaced, match="attempt 3 was replaced by attempt 1 of another pipeline"
    ):
        third.check()
    take_token(tmp_path, Attempt("p", 4)).check()


def test_process_without_a_number_takes_over(tmp_path: Path) -> None:
    first = take_token(tmp_path, Attempt())
    take_token(tmp_path, Attempt()).check()
    with pytest.raises(
        Replaced, match="a process without an attempt's number was replaced"
    ):
        first.check()


def test_token_that_a_killed_process_began_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".attempts" / ".00000001.0123abcd").mkdir(parents=True)
    take_token(tmp_path, FIRST).check()
    assert tokens_in(tmp_path) == ["00000001"]


@pytest.mark.parametrize("other", ["file", "empty folder"])
def test_token_without_an_owner_is_passed(tmp_path: Path, other: str) -> None:
    take_token(tmp_path, FIRST)
    token = tmp_path / ".attempts" / "00000002"
    token.touch() if other == "file" else token.mkdir()
    take_token(tmp_path, FIRST).check()
    assert tokens_in(tmp_path)[-1] == "00000003"


@pytest.mark.parametrize("number", [1, 3])
def test_token_taken_after_a_look_at_its_owner_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Another attempt takes a token right after the owner's name was read."""
    check_order = fence.check_order

    def read_then_sleep(folder: Path, attempt: Attempt) -> int:
        newest = check_order(folder, attempt)
        monkeypatch.setattr(fence, "check_order", check_order)
        take_token(tmp_path, SECOND)
        return newest

    monkeypatch.setattr(fence, "check_order", read_then_sleep)
    if number == 1:
        with pytest.raises(Replaced, match="attempt 1 was replaced by attempt 2"):
            take_token(tmp_path, FIRST)
    else:
        take_token(tmp_path, Attempt("p", number)).check()


def test_token_that_others_have_passed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt sleeps before it creates its token, while two newer ones take theirs and one writes."""
    create = fence._create

    def sleep_before(path: Path, attempt: Attempt) -> bool:
        monkeypatch.setattr(fence, "_create", create)
        take_token(tmp_path, SECOND)
        third = take_token(tmp_path, Attempt("p", 3))
        (tmp_path / f".output.{third.label}.0123abcd").mkdir()
        return create(path, attempt)

    monkeypatch.setattr(fence, "_create", sleep_before)
    with pytest.raises(Replaced, match="attempt 1 was replaced by attempt 3"):
        take_token(tmp_path, FIRST)
    assert (tmp_path / ".output.a3t2.0123abcd").is_dir()
    assert tokens_in(tmp_path) == ["00000002"]


def test_parallel_attempts_have_one_owner(tmp_path: Path) -> None:
    made: list[Fence] = []

    def compete(number: int) -> None:
        try:
            made.append(take_token(tmp_path, Attempt("p", number)))
        except Replaced:
            return

    threads = [
        threading.Thread(target=compete, args=(number,)) for number in range(1, 17)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [fence for fence in made if not is_replaced(fence)]
    assert [owner.attempt.number for owner in owners] == [16]


def is_replaced(fence: Fence) -> bool:
    try:
        fence.check()
    except Replaced:
        return True
    return False


# ---- publishing


def write_while_replaced(folder: Path, first: Fence) -> None:
    with artifacts.atomic_folder(folder / "output", fence=first) as temporary:
        assert temporary.name.startswith(".output.a1t1.")
        (temporary / "file").touch()
        take_token(folder, SECOND)
        assert not temporary.exists()


def test_folder_of_a_replaced_attempt_is_not_published(tmp_path: Path) -> None:
    first = take_token(tmp_path, FIRST)
    with pytest.raises(Replaced):
        write_while_replaced(tmp_path, first)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".attempts"]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("exists", [True, False])
def test_rename_after_the_check_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, exchange: bool, exists: bool
) -> None:
    """The attempt sleeps after its check: the newer one has removed what it wants to rename."""
    if not exchange:
        monkeypatch.setattr(artifacts, "exchange", lambda *_: False)
    if exists:
        (tmp_path / "output").mkdir()
        (tmp_path / "output" / "of").write_text("the newer one")
    move = artifacts.move_into_place
    first = take_token(tmp_path, FIRST)

    def sleep_before(temporary: Path, folder: Path) -> None:
        take_token(tmp_path, SECOND)
        move(temporary, folder)

    monkeypatch.setattr(artifacts, "move_into_place", sleep_before)
    with (
        pytest.raises(Replaced),
        artifacts.atomic_folder(tmp_path / "output", fence=first) as temporary,
    ):
        (temporary / "file").touch()
    assert (tmp_path / "output").is_dir() == exists
    assert [path.name for path in (tmp_path / "output").glob("*")] == (
        ["of"] if exists else []
    )


def test_file_of_a_replaced_attempt_is_not_written(tmp_path: Path) -> None:
    first = take_token(tmp_path, FIRST)
    take_token(tmp_path, SECOND)
    with pytest.raises(Replaced):
        write_durably(tmp_path / "result.json", b"{}", first.check)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".attempts"]


# ---- a lock whose holder is silent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("finetune_trainer.runtime.fence.time.monotonic", lambda: now[0])
    return now


def test_holder_without_heartbeats_is_silent_after_30_seconds(
    tmp_path: Path, clock: list[float]
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    holder = SilentHolder(tmp_path, lock, SECOND)
    assert not holder()
    clock[0] += 29
    assert not holder()
    clock[0] += 1
    assert holder()


def test_heartbeat_starts_the_time_anew(tmp_path: Path, clock: list[float]) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    holder = SilentHolder(tmp_path, lock, SECOND)
    holder()
    for second in range(5):
        clock[0] += 29
        os.utime(lock, (second, second))  # a clock that is decades behind
        assert not holder()


def test_earlier_attempt_does_not_wait_for_a_later_one(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path, SECOND),
        pytest.raises(Replaced),
        exclusive(tmp_path, FIRST),
    ):
        pass


def test_live_holder_beats_and_is_told_when_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "HEARTBEAT_SECONDS", 0.01)
    noticed = threading.Event()
    errors = []

    def on_replaced(error: Replaced) -> None:
        errors.append(str(error))
        noticed.set()

    with exclusive(tmp_path, FIRST, on_replaced):
        os.utime(tmp_path / ".lock", (1, 1))
        deadline = threading.Event()
        while (tmp_path / ".lock").stat().st_mtime == 1:
            assert not deadline.wait(0.01)
        take_token(tmp_path, SECOND)
        assert noticed.wait(10)
    assert errors == [
        "attempt 1 was replaced by attempt 2: it ends and publishes nothing"
    ]


# ---- two processes
