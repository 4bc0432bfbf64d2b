"""Results that nothing uses are removed when a stage starts, and nothing else is."""

import fcntl
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune_trainer import result_folders
from finetune_trainer.contract import Environment, PrepareConfig, Pruning
from finetune_trainer.runtime.entrypoint import run_or_reuse
from finetune_trainer.runtime.errors import Replaced
from finetune_trainer.runtime.fence import Attempt, Fence, take_token
from finetune_trainer.runtime.pruning import prune
from finetune_trainer.runtime.stage_folder import exclusive

OWN = "a" * 16
UID = "uid-1"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


def identity_of(number: int) -> str:
    return f"{number:016x}"


def add_result(
    workspace: Path,
    number: int,
    *,
    stage: str = "train",
    finished: bool = True,
    pipeline: str = UID,
) -> str:
    """Add the folder of a result, the older the smaller its number; return STAGE/IDENTITY."""
    folder = workspace / stage / identity_of(number)
    with exclusive(folder, Attempt(pipeline, number)):
        (folder / "output").mkdir()
        (folder / "output" / "weights").write_text("weights")
    if finished:
        (folder / "result.json").write_text("{}")
    for path in (folder, folder / ".lock", folder / ".attempts"):
        os.utime(path, (1000 + number, 1000 + number))
    return f"{stage}/{folder.name}"


def config(stage_uri: str = "hf://org/base") -> PrepareConfig:
    return PrepareConfig.model_validate(
        {
            "identity": OWN,
            "model": {"uri": stage_uri},
            "datasets": [{"uri": "hf://org/data/train.jsonl"}],
            "recipe": {},
        }
    )


def environment(
    workspace: Path, *keep: str, keep_unused: int = 0, shared: bool = False
) -> Environment:
    pruning = Pruning((f"prepare/{OWN}", *keep), keep_unused, shared)
    return Environment(workspace, pipeline_uid=UID, attempt=9, pruning=pruning)


def results(workspace: Path) -> list[str]:
    """Return the results that are left, whole."""
    return sorted(
        str(path.parent.parent.relative_to(workspace))
        for path in workspace.glob("*/*/output/weights")
        if not path.parent.parent.name.startswith(".")
    )


def test_results_that_no_status_names_are_removed(workspace: Path) -> None:
    used = add_result(workspace, 1)
    add_result(workspace, 2)
    earlier = add_result(workspace, 3, stage="prepare")
    prune(config(), environment(workspace, used), Fence())
    assert results(workspace) == [used]
    assert not (workspace / earlier).exists()


def test_later_stages_are_left_alone(workspace: Path) -> None:
    """Their identities may still become the identities of an earlier spec."""
    add_result(workspace, 1, stage="prepare")
    later = add_result(workspace, 2)
    prune(config(), environment(workspace), Fence())
    assert results(workspace) == [later]


@pytest.mark.parametrize(("keep", "left"), [(0, []), (1, [3, 5]), (2, [1, 3, 4, 5])])
def test_newest_stay_finished_and_unfinished(
    workspace: Path, keep: int, left: list[int]
) -> None:
    """A short attempt with a mistake does not displace the result of the last good spec."""
    names = {
        number: add_result(workspace, number, finished=number in {1, 2, 3} - {2})
        for number in (1, 2, 3, 4, 5)
    }
    named = "train/" + "b" * 16
    prune(config(), environment(workspace, named, keep_unused=keep), Fence())
    assert results(workspace) == [names[number] for number in left]


def test_reuse_makes_a_result_newer(workspace: Path) -> None:
    first = add_result(workspace, 1)
    add_result(workspace, 2)
    with exclusive(workspace / first, Attempt(UID, 8)):
        pass
    named = "train/" + "b" * 16
    prune(config(), environment(workspace, named, keep_unused=1), Fence())
    assert results(workspace) == [first]


def test_used_result_is_newer_than_unused_results(workspace: Path) -> None:
    """It was made before them, and other stages have used it since."""
    used = add_result(workspace, 1)
    add_result(workspace, 2)
    prune(config(), environment(workspace, used, keep_unused=1), Fence())
    named = "train/" + "b" * 16
    prune(config(), environment(workspace, named, keep_unused=1), Fence())
    assert results(workspace) == [used]


def test_result_that_the_config_names_by_its_path_stays(workspace: Path) -> None:
    read = add_result(workspace, 1)
    add_result(workspace, 2)
    named = "train/" + "b" * 16
    place = environment(workspace, named)
    prune(config(f"pvc://demo-workspace/{read}/output"), place, Fence())
    assert results(workspace) == [read]


def test_without_the_variable_nothing_is_removed(workspace: Path) -> None:
    result = add_result(workspace, 1, stage="prepare")
    place = replace(environment(workspace), pruning=None)
    prune(config(), place, Fence())
    assert results(workspace) == [result]


def test_shared_workspace_keeps_results_of_other_pipelines(workspace: Path) -> None:
    foreign = add_result(workspace, 1, stage="prepare", pipeline="uid-2")
    both = add_result(workspace, 2, stage="prepare", pipeline="uid-2")
    with exclusive(workspace / both, Attempt(UID, 2)):
        pass
    own = add_result(workspace, 3, stage="prepare")
    # A program of the user, or an earlier version of the trainer, records no pipeline.
    unmarked = add_result(workspace, 4, stage="prepare")
    for user in (workspace / unmarked / ".pipelines").iterdir():
        user.unlink()
    (workspace / unmarked / ".pipelines").rmdir()
    prune(config(), environment(workspace, shared=True), Fence())
    assert results(workspace) == [foreign, both, unmarked]
    assert own not in results(workspace)


def test_folder_of_an_earlier_version_stays_when_reused(workspace: Path) -> None:
    older = add_result(workspace, 1, stage="prepare")
    (workspace / older / ".pipelines" / UID).unlink()
    (workspace / older / ".pipelines").rmdir()
    with exclusive(workspace / older, Attempt(UID, 2)):
        pass
    prune(config(), environment(workspace, shared=True), Fence())
    assert results(workspace) == [older]


def hold(folder: Path) -> None:
    with exclusive(folder, Attempt("uid-2", 1)):
        (folder / "held").touch()
        time.sleep(60)


def test_folder_in_which_a_process_works_stays(workspace: Path) -> None:
    busy = add_result(workspace, 1, stage="prepare")
    process = get_context("fork").Process(target=hold, args=(workspace / busy,))
    process.start()
    while not (workspace / busy / "held").exists():
        time.sleep(0.01)
    prune(config(), environment(workspace), Fence())
    assert results(workspace) == [busy]
    process.kill()
    process.join()
    prune(config(), environment(workspace), Fence())
    assert results(workspace) == []


@pytest.mark.parametrize("silent", [False, True])
def test_without_locks_only_a_silent_folder_is_removed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, *, silent: bool
) -> None:
    older = add_result(workspace, 1, stage="prepare")
    (workspace / "prepare" / OWN).mkdir()
    last_use = time.time() - (result_folders.SILENT_SECONDS + 1 if silent else 5)
    os.utime(workspace / older, (last_use, last_use))

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    prune(config(), environment(workspace), Fence())
    assert results(workspace) == ([] if silent else [older])


def test_replaced_process_removes_nothing(workspace: Path) -> None:
    result = add_result(workspace, 1, stage="prepare")
    folder = workspace / "prepare" / OWN
    fence = take_token(folder, Attempt(UID, 8))
    take_token(folder, Attempt(UID, 9))
    with pytest.raises(Replaced):
        prune(config(), environment(workspace), fence)
    assert results(workspace) == [result]


def delete_a_file_and_die(folder: Path, **_: object) -> None:
    [weights] = folder.rglob("weights")
    weights.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def prune_until_killed(workspace: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_a_file_and_die)
        prune(config(), environment(workspace), Fence())


def test_kill_during_a_removal_leaves_no_half_of_a_result(workspace: Path) -> None:
    result = add_result(workspace, 1, stage="prepare")
    process = get_context("fork").Process(target=prune_until_killed, args=(workspace,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (workspace / result).exists()
    # The same spec again starts in a new folder.
    with exclusive(workspace / result, Attempt(UID, 3)):
        assert not (workspace / result / "output").exists()
    prune(config(), environment(workspace, result), Fence())
    assert [path.name for path in (workspace / "prepare").iterdir()] == [identity_of(1)]


def test_folder_that_cannot_be_removed_ends_no_stage(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = add_result(workspace, 1, stage="prepare")

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    prune(config(), environment(workspace), Fence())
    monkeypatch.undo()
    assert results(workspace) == [result]
    assert "unused results in" in capsys.readouterr().out


def test_stage_frees_space_before_it_begins_to_work(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_result(workspace, 1, stage="prepare")
    seen: list[list[str]] = []

    def run(*_: object) -> None:
        seen.append(results(workspace))
        raise Replaced("enough")

    module = SimpleNamespace(run=run, is_output_valid=lambda *_: True)
    monkeypatch.setitem(sys.modules, "finetune_trainer.stages.prepare", module)
    with pytest.raises(Replaced, match="enough"):
        run_or_reuse(config(), environment(workspace))
    assert seen == [[]]


def test_variables_name_the_same_results(workspace: Path) -> None:
    place = environment(workspace, "train/" + "b" * 16, keep_unused=0, shared=True)
    assert Environment.read(place.variables()).pruning == place.pruning
