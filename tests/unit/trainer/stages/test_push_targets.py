"""What push leaves in its targets: whole models under their digests, and `latest`."""

import itertools
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.stores.models import contents
from support.trainer.forkserver import ForkServer
from support.trainer.pushes import (
    TARGET,
    folder_of,
    names_in,
    push,
    push_config,
    push_environment,
    unfinished_in,
    verify_target,
    with_targets,
)
from support.trainer.stages import run_in_process, run_to_failure
from support.trainer.target_state import (
    FileState,
    flip_last_byte,
    forget_result,
    state_of,
)

from finetune_trainer.contract import (
    Environment,
    ExitCode,
    Lineage,
    PushConfig,
    PushTarget,
)
from finetune_trainer.publishing.published_model import read_published
from finetune_trainer.runtime.artifacts import verify
from finetune_trainer.runtime.errors import DataInvalid, SourceNotFound
from finetune_trainer.sizes import format_size
from finetune_trainer.stages.push import is_output_valid
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.port import Listing


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    return push_environment(tmp_path, tiny_model)


@pytest.fixture
def config(tiny_model: Path) -> PushConfig:
    return push_config(tiny_model)


@pytest.fixture
def other(tiny_model: Path) -> PushConfig:
    """The config of another model."""
    return push_config(tiny_model, identity="p2", train="second")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "claims" / "models" / "names"


def test_model_lies_under_its_digest_and_is_the_latest(
    environment: Environment, config: PushConfig, other: PushConfig, target: Path
) -> None:
    first = push(config, environment)
    second = push(other, environment)
    assert verify_target(target) == {
        folder_of(target, first).name,
        folder_of(target, second).name,
    }
    assert (target / "latest").resolve() == folder_of(target, second)
    assert second.published[0].uri == f"{TARGET.uri}/{folder_of(target, second).name}"


def test_workspace_has_no_copy_of_the_model_at_the_end(
    environment: Environment, config: PushConfig
) -> None:
    push(config, environment)
    assert names_in(environment.stage_dir("push", "p1")) == [
        ".attempts",
        ".lock",
        ".pipelines",
        "config.json",
        "result.json",
    ]


def test_same_model_is_not_written_twice(
    environment: Environment,
    config: PushConfig,
    target: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    first = push(config, environment)
    before = state_of(target)
    forget_result(config, environment)
    assert push(config, environment) == first
    lineage = Lineage(pipeline="default/names", interruptions=9)
    assert (
        push(
            config.model_copy(update={"identity": "p2", "lineage": lineage}),
            environment,
        ).digest
        == first.digest
    )
    assert state_of(target) == before
    assert re.findall(r"sent (.+) of", capfd.readouterr().out) == [
        format_size(first.published[0].size),
        format_size(0),
        format_size(0),
    ]


def test_corrupt_or_missing_model_is_pushed_again(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    first = push(config, environment)
    before = contents(target)
    weights = target / "latest" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert push(config, environment) == first
    assert contents(target) == before
    shutil.rmtree(target)
    assert push(config, environment) == first
    assert contents(target) == before


@pytest.mark.parametrize("damage", ["lost", "spoilt", "foreign", "claim"])
def test_output_is_invalid_once_one_target_lacks_its_model(
    environment: Environment, config: PushConfig, target: Path, damage: str
) -> None:
    config = with_targets(
        config, TARGET, PushTarget(uri="pvc://models/adapter", format="Adapter")
    )
    result = push(config, environment)
    assert is_output_valid(result, config, environment)
    model = folder_of(target.with_name("adapter"), result.published[1])
    if damage == "lost":
        shutil.rmtree(model)
    elif damage == "spoilt":
        flip_last_byte(model / "adapter_model.safetensors")
    elif damage == "foreign":
        (model / "notes.txt").write_text("mine")
    else:
        shutil.rmtree(target.parent)
    assert not is_output_valid(result, config, environment)


@pytest.mark.parametrize(
    "error", [DataInvalid("has 0 bytes"), SourceNotFound("no image")]
)
def test_output_is_invalid_once_a_store_has_lost_a_part(
    environment: Environment,
    config: PushConfig,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    class DamagedSource:
        def list_files(self, _pin: str | None) -> Listing:
            raise error

    result = push(config, environment)
    monkeypatch.setattr(
        "finetune_trainer.stages.push.open_source", lambda *_: DamagedSource()
    )
    assert not is_output_valid(result, config, environment)


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause after each change of a name, long enough for a reader to notice a missing name."""
    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(Path, name, followed_by_pause(getattr(Path, name)))


def followed_by_pause(change: Callable[..., Path | None]) -> Callable[..., Path | None]:
    def slow(*arguments: Path, **options: bool) -> Path | None:
        returned = change(*arguments, **options)
        time.sleep(0.1)
        return returned

    return slow


@pytest.mark.usefixtures("slow_names")
def test_reader_of_latest_always_finds_a_whole_model(
    environment: Environment, config: PushConfig, other: PushConfig, target: Path
) -> None:
    first = push(config, environment)
    observed: list[str | None] = []
    is_done = threading.Event()

    def read() -> None:
        published = read_published(target / "latest")
        observed.append(published.digest if published else None)

    def read_until_done() -> None:
        while not is_done.wait(0.001):
            read()
        read()

    reader = threading.Thread(target=read_until_done)
    reader.start()
    second = push(other, environment)
    is_done.set()
    reader.join()
    assert [digest for digest, _ in itertools.groupby(observed)] == [
        first.digest,
        second.digest,
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("names/notes.txt", "notes.txt was not written by a push"),
        ("names", "names is no folder"),
    ],
)
def test_foreign_files_at_the_target_are_not_replaced(
    environment: Environment, config: PushConfig, target: Path, name: str, expected: str
) -> None:
    foreign_file = target.parent / name
    foreign_file.parent.mkdir(exist_ok=True)
    foreign_file.write_text("mine")
    message, code = run_to_failure(config, environment)
    assert "push.targets pvc://models/names" in message
    assert expected in message
    assert code == ExitCode.CONFIG
    assert contents(target.parent) == {name: b"mine"}


def test_foreign_file_in_a_pushed_model_is_not_deleted(
    environment: Environment, config: PushConfig, other: PushConfig, target: Path
) -> None:
    notes = folder_of(target, push(config, environment)) / "notes.txt"
    notes.write_text("mine")
    message, code = run_to_failure(config, environment)
    assert f"{notes.parent.name}/notes.txt was not written by a push" in message
    assert code == ExitCode.CONFIG
    push(other, environment)  # another model is another folder
    assert notes.read_text() == "mine"


def test_trained_adapter_is_not_replaced_by_a_push(
    environment: Environment, config: PushConfig
) -> None:
    adapter = environment.stage_dir("train", "second") / "output"
    _, code = run_to_failure(with_targets(config, f"file://{adapter}"), environment)
    assert code == ExitCode.CONFIG
    verify(adapter)


def test_empty_folder_is_accepted_as_a_target(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    target.mkdir()
    result = push(config, environment)
    assert verify_target(target) == {folder_of(target, result).name}


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Limit files to 20 kB: a larger write fails with EFBIG, like a write to a full disk with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=30_000)
    monkeypatch.setattr(
        "finetune_trainer.stages.push.shutil.disk_usage", lambda _path: full
    )


@pytest.mark.parametrize(
    ("disk", "expected"),
    [("small_files_only", "cannot write"), ("full_disk", "30 kB are free")],
)
def test_full_workspace_is_reported_and_no_target_changes(  # noqa: PLR0917  fixtures
    environment: Environment,
    config: PushConfig,
    target: Path,
    request: pytest.FixtureRequest,
    disk: str,
    expected: str,
) -> None:
    """The adapter would fit, but nothing is published before all of it is built."""
    push(config, environment)
    before = state_of(target)
    names = names_in(target)
    request.getfixturevalue(disk)
    as_adapter = PushTarget(uri=TARGET.uri, format="Adapter")
    both = with_targets(config, as_adapter, "pvc://models/merged")
    message, code = run_to_failure(both, environment)
    assert expected in message
    assert "free some space" in message
    assert code == ExitCode.UNAVAILABLE
    assert state_of(target) == before
    assert names_in(target) == names
    assert names_in(target.parent) == ["names"]
    assert names_in(environment.stage_dir("push", both.identity) / "models") == [
        "adapter"
    ]


def test_stop_between_two_files_leaves_the_target_as_it_was(
    environment: Environment,
    config: PushConfig,
    other: PushConfig,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = push(config, environment)
    monkeypatch.setattr(stop, "requested", True)
    _, code = run_in_process(other, environment)
    assert code == ExitCode.INTERRUPTED
    assert verify_target(target) == {folder_of(target, first).name}
    assert unfinished_in(target) == []
    monkeypatch.setattr(stop, "requested", False)
    assert push(other, environment).digest != first.digest


@pytest.fixture
def killed(
    fork_server: ForkServer,
    environment: Environment,
    config: PushConfig,
    target: Path,
    tmp_path: Path,
) -> dict[str, FileState]:
    """Kill a push while it publishes; return the files that it had built."""
    process = fork_server.start(config, environment, tmp_path / "log", slow_disk=0.05)
    assert process.until(lambda: any(target.glob(".sha256-*/config.json")))
    process.kill(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(unfinished_in(target)) == 1
    assert verify_target(target) == set()
    return state_of(
        environment.stage_dir("push", config.identity) / "models" / "merged"
    )


def test_model_is_not_built_again_after_a_kill_in_publishing(
    killed: dict[str, FileState],
    environment: Environment,
    config: PushConfig,
    target: Path,
) -> None:
    """The published files are hard links of the files that the killed process has built."""
    result = push(config, environment)
    assert state_of(target / "latest") == killed
    folder = folder_of(target, result).name
    assert names_in(target) == [".latest.lock", f".{folder}.lock", "latest", folder]


def test_built_model_that_is_spoilt_is_built_again(
    killed: dict[str, FileState],
    environment: Environment,
    config: PushConfig,
    target: Path,
) -> None:
    flip_last_byte(
        environment.stage_dir("push", config.identity)
        / "models"
        / "merged"
        / "model.safetensors"
    )
    result = push(config, environment)
    assert verify_target(target) == {folder_of(target, result).name}
    # Another file with the same content. Its inode alone may be the deleted file's.
    *file, weights = state_of(target / "latest")["model.safetensors"]
    *spoilt_file, built_weights = killed["model.safetensors"]
    assert file != spoilt_file
    assert weights == built_weights


@pytest.mark.usefixtures("killed")
def test_leftovers_of_a_killed_push_are_removed_by_another(
    environment: Environment, other: PushConfig, target: Path
) -> None:
    result = push(other, environment)
    assert unfinished_in(target) == []
    assert verify_target(target) == {folder_of(target, result).name}
