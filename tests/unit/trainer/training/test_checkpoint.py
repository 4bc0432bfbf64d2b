"""A corrupt checkpoint is named and skipped: training resumes from the one before and ends in the same bytes."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.trainer.checkpoint_damage import (
    emptied,
    empty,
    first_as,
    first_renamed,
    flip,
    missing,
    put_folder,
    replaced_by_file,
    resealed,
    truncate,
    with_manifest,
    with_state,
    with_tensors,
)
from support.trainer.training import (
    adapter_digest,
    documents,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)

from finetune_trainer.contract.metric_rows import METRICS, read_rows
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.errors import Interrupted

torch.set_num_threads(1)

NEWEST = "step-00000007"
BEFORE = "step-00000004"
FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "best.safetensors",
    "manifest.json",
    "optimizer.safetensors",
    "state.json",
)


def config_for(model, **changes):
    return train_config(
        model, max_steps=9, eval_steps=3, checkpoint={"every_steps": 4}, **changes
    )


@pytest.fixture(scope="module")
def stopped(tiny_model, tmp_path_factory):
    """A workspace with checkpoints at step 4, and at step 7, after which training was stopped.

    Also the result and the adapter digest of an uninterrupted run of the same config.
    """
    workspace = tmp_path_factory.mktemp("stopped")
    write_rows(workspace, documents(60), documents(8, seed=5))
    uninterrupted = config_for(tiny_model, identity="w" * 16)
    result = run_train(uninterrupted, workspace)
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), workspace, stop_at=7)
    return workspace, result, adapter_digest(workspace, "w" * 16)


@pytest.fixture
def copy(stopped, tmp_path):
    workspace = tmp_path / "workspace"
    shutil.copytree(stopped[0], workspace)
    return workspace


WEIGHTS = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"{name} truncated": (truncate(name), rf"{name} (has \d+ bytes|cannot be read)")
        for name in FILES
    },
    **{
        f"{name} empty": (empty(name), rf"{name} (has 0 bytes|cannot be read)")
        for name in FILES
    },
    **{
        f"{name} missing": (missing(name), f"{name} is missing|there is no {name}")
        for name in FILES
    },
    **{
        f"one bit of {name}": (
            flip(name),
            f"{name} does not match the|manifest.json|belongs to another run",
        )
        for name in FILES
    },
    "an empty folder": (emptied, "there is no manifest.json"),
    "a file in place of the folder": (replaced_by_file, "is not a folder"),
    "an unexpected file": (
        lambda folder: (folder / "core.123").write_text("x"),
        "core.123 is not in its manifest",
    ),
    "a folder in place of a file": (
        lambda folder: put_folder(folder / "state.json"),
        "state.json is missing",
    ),
    "a folder in place of the manifest": (
        lambda folder: put_folder(folder / "manifest.json"),
        "directory",
    ),
    "a manifest that is not JSON": (
        lambda folder: (folder / "manifest.json").write_text("{]"),
        "cannot be read",
    ),
    "a manifest of another shape": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "cannot be read",
    ),
    "a manifest nested too deeply": (
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
        "recursion|cannot be read",
    ),
    "a manifest that names a file outside": (
        with_manifest(
            lambda manifest: manifest["files"].update(
                {"/etc/hostname": {"size": 1, "sha256": ""}}
            )
        ),
        "does not match its own digest",
    ),
    "a manifest of another run": (
        with_manifest(lambda manifest: manifest["about"].update(identity="f" * 16)),
        "belongs to another run: identity ffffffffffffffff",
    ),
    "a manifest of other rows": (
        with_manifest(lambda manifest: manifest["about"].update(rows="sha256:0")),
        "belongs to another run: rows sha256:0",
    ),
    "a manifest of another step": (
        with_manifest(lambda manifest: manifest["about"].update(step=8)),
        "holds step 8, not the step in its name",
    ),
    "a state of another step": (
        with_state(step=8),
        "holds step 8, not the step in its name",
    ),
    "a state after the last step": (
        with_state(step=99),
        "at step 99, this run has steps 1 to 9",
    ),
    "a state with an unknown counter": (
        with_state(epoch=1),
        "state.json cannot be read",
    ),
    "a state with a loss that is not finite": (
        with_state(best_loss="NaN"),
        "state.json cannot be read",
    ),
    "weights of another shape": (
        with_tensors(WEIGHTS, first_as(lambda t: t[:, :-1].contiguous())),
        "this run's is",
    ),
    "weights of another dtype": (
        with_tensors(WEIGHTS, first_as(torch.Tensor.double)),
        "float64",
    ),
    "weights under another name": (
        with_tensors(WEIGHTS, first_renamed),
        "has an unexpected tensor another",
    ),
    "weights that are not finite": (
        with_tensors(WEIGHTS, first_as(lambda t: t * float("nan"))),
        "is not finite",
    ),
    "weights that are text": (
        resealed(lambda folder: (folder / WEIGHTS).write_text("x" * 99)),
        "cannot be read",
    ),
    "best weights of another shape": (
        with_tensors("best.safetensors", first_as(lambda t: t[:1].contiguous())),
        "best.safetensors: .* this run's is",
    ),
    "best weights missing although the state names their step": (
        resealed(missing("best.safetensors")),
        "best.safetensors cannot be read",
    ),
    "optimizer state of another shape": (
        with_tensors(OPTIMIZER, first_as(lambda t: t[:1].contiguous())),
        "this run's is",
    ),
    "one tensor of the optimizer state missing": (
        with_tensors(
            OPTIMIZER,
            lambda tensors: {k: v for k, v in tensors.items() if k != min(tensors)},
        ),
        "lacks the tensor",
    ),
    "no optimizer state": (
        with_tensors(OPTIMIZER, lambda _tensors: {}),
        "has no optimizer state",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_corrupt_checkpoint_falls_back_to_previous(
    tiny_model, stopped, copy, capsys, damage
):
    checkpoints = stage_folder(copy) / "checkpoints"
    change, reason = DAMAGES[damage]
    change(checkpoints / NEWEST)
    result = run_train(config_for(tiny_model), copy)
    log = capsys.readouterr().out
    skipped = next(
        line for line in log.splitlines() if "is corrupt and was skipped" in line
    )
    assert NEWEST in skipped
    message = skipped + log.partition(skipped)[2].partition("train: resumed")[0]
    assert re.search(reason, message, re.DOTALL), message
    assert "train: resumed from step 4 of 9" in log
    assert result == stopped[1].model_copy(update={"identity": result.identity})
    assert adapter_digest(copy) == stopped[2]


def test_intact_checkpoint_is_loaded(tiny_model, stopped, copy, capsys):
    assert sorted(
        file.name for file in (stage_folder(copy) / "checkpoints" / NEWEST).iterdir()
    ) == list(FILES)
    run_train(config_for(tiny_model), copy)
    log = capsys.readouterr().out
    assert "resumed from step 7 of 9" in log
    assert "corrupt" not in log
    assert adapter_digest(copy) == stopped[2]


def test_all_checkpoints_corrupt_restarts_from_beginning(
    tiny_model, stopped, copy, capsys
):
    for folder in (stage_folder(copy) / "checkpoints").iterdir():
        flip(WEIGHTS)(folder)
    run_train(config_for(tiny_model), copy)
    log = capsys.readouterr().out
    assert log.count("is corrupt and was skipped") == 2
    assert "none of 2 checkpoints is usable: training starts from the beginning" in log
    assert adapter_digest(copy) == stopped[2]


def test_corrupt_checkpoint_is_kept_until_a_newer_one_exists(tiny_model, copy):
    checkpoints = stage_folder(copy) / "checkpoints"
    flip(WEIGHTS)(checkpoints / NEWEST)
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), copy, stop_at=5)
    assert sorted(folder.name for folder in checkpoints.iterdir()) == [
        BEFORE,
        "step-00000005",
        NEWEST,
    ]
    artifacts.verify(checkpoints / "step-00000005")
    run_train(config_for(tiny_model), copy)
    for folder in checkpoints.iterdir():
        artifacts.verify(folder)


def test_metrics_of_a_step_are_durable_before_its_checkpoint(
    tiny_model, tmp_path, monkeypatch
):
    durable: dict[int, list[str]] = {}
    """Last step of the durable metrics -> the checkpoints that were complete by then."""
    fsync = os.fsync

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        file = Path(f"/proc/self/fd/{descriptor}").resolve()
        rows = read_rows(file) if file.name == METRICS else []
        if rows:
            complete = [
                folder.name for folder in (file.parent / "checkpoints").glob("step-*")
            ]
            durable.setdefault(rows[-1].step, complete)

    write_rows(tmp_path, documents(60), documents(8, seed=5))
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), tmp_path, stop_at=7)
    for folder in (stage_folder(tmp_path) / "checkpoints").iterdir():
        step = int(folder.name.removeprefix("step-"))
        assert any(
            last >= step and folder.name not in complete
            for last, complete in durable.items()
        )


def test_checkpoint_whose_name_has_another_step_is_skipped(
    tiny_model, stopped, copy, capsys
):
    checkpoints = stage_folder(copy) / "checkpoints"
    shutil.copytree(checkpoints / BEFORE, checkpoints / "step-00000008")
    run_train(config_for(tiny_model), copy)
    assert (
        "step-00000008 holds step 4, not the step in its name"
        in capsys.readouterr().out
    )
    assert adapter_digest(copy) == stopped[2]


def test_unfinished_checkpoint_of_killed_process_is_removed(
    tiny_model, stopped, copy, capsys
):
    checkpoints = stage_folder(copy) / "checkpoints"
    shutil.copytree(checkpoints / NEWEST, checkpoints / ".step-00000008.4711")
    run_train(config_for(tiny_model), copy)
    assert (
        "removed the unfinished checkpoint .step-00000008.4711"
        in capsys.readouterr().out
    )
    assert not list(checkpoints.glob(".*"))
    assert adapter_digest(copy) == stopped[2]


def test_file_in_place_of_checkpoint_folder_is_moved(tiny_model, stopped, copy, capsys):
    checkpoints = stage_folder(copy) / "checkpoints"
    replaced_by_file(checkpoints)
    run_train(config_for(tiny_model), copy)
    assert (
        "is not a folder: moved it to checkpoints.not-a-folder"
        in capsys.readouterr().out
    )
    assert adapter_digest(copy) == stopped[2]


def test_unrelated_entry_in_checkpoint_folder_is_kept(tiny_model, stopped, copy):
    checkpoints = stage_folder(copy) / "checkpoints"
    (checkpoints / "step-latest").symlink_to(checkpoints / NEWEST)
    run_train(config_for(tiny_model), copy)
    assert (checkpoints / "step-latest").is_symlink()
    assert adapter_digest(copy) == stopped[2]


def test_resume_restores_thread_count_of_checkpoint(
    tiny_model, copy, capsys, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        torch.set_num_threads(2)
        run_train(config_for(tiny_model), copy)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    assert "may differ" not in capsys.readouterr().out


def test_resume_with_other_omp_num_threads_logs_warning(
    tiny_model, copy, capsys, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        torch.set_num_threads(2)
        run_train(config_for(tiny_model), copy)
    finally:
        torch.set_num_threads(1)
    assert (
        "saved with threads 1, this process has 2: the result may differ in its last bits"
        in capsys.readouterr().out
    )
