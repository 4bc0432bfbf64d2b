"""The loop at its boundaries: what may change, what may not, and where it stops."""

import shutil

import pytest
import torch
from support.training import (
    StoppingProgress,
    adapter_digest,
    document,
    documents,
    environment,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)

from finetune_trainer.contract import Optimizer
from finetune_trainer.runtime.errors import Interrupted, ServiceUnavailable
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.checkpoint_manager import CheckpointManager
from finetune_trainer.training.optimizer import learning_rate
from finetune_trainer.training.state import State

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("packed")
    write_rows(workspace, documents(60), documents(8, seed=5))
    return workspace


@pytest.fixture
def workspace(packed, tmp_path):
    shutil.copytree(packed / "prepare", tmp_path / "prepare")
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tiny_model, packed):
    """The result and the adapter of ten steps with no checkpoint in between."""
    result = run_train(config_for(tiny_model, checkpoint={"every_steps": 1000}, identity="w" * 16), packed)
    return result, adapter_digest(packed, "w" * 16)


def config_for(model, **changes):
    return train_config(
        model, **{"max_steps": 10, "validate_every_steps": 4, "checkpoint": {"every_steps": 3}} | changes
    )


def folders(workspace):
    return sorted(folder.name for folder in (stage_folder(workspace) / "checkpoints").iterdir())


@pytest.mark.parametrize("rule", [{"every_steps": 1}, {"every_steps": 3, "keep": 3}, {"every_seconds": 1}], ids=str)
def test_when_checkpoints_are_made_changes_no_byte(tiny_model, workspace, undisturbed, rule):
    assert run_train(config_for(tiny_model, checkpoint=rule), workspace) == undisturbed[0].model_copy(
        update={"identity": "a" * 16}
    )
    assert adapter_digest(workspace) == undisturbed[1]


@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_a_run_stopped_at_any_step_ends_in_the_same_bytes(tiny_model, workspace, undisturbed, step):
    with pytest.raises(Interrupted) as interrupted:
        run_train(config_for(tiny_model), workspace, stop_at=step)
    assert (interrupted.value.step, interrupted.value.saved_step) == (step, step)
    result = run_train(config_for(tiny_model), workspace)
    assert result.model_copy(update={"identity": "w" * 16}) == undisturbed[0]
    assert adapter_digest(workspace) == undisturbed[1]


@pytest.mark.parametrize("step", [4, 10])
def test_a_run_stopped_while_it_validates_ends_in_the_same_bytes(tiny_model, workspace, undisturbed, step):
    with pytest.raises(Interrupted) as interrupted:
        run_train(config_for(tiny_model), workspace, stop_at=step, validating=True)
    assert interrupted.value.saved_step == step
    run_train(config_for(tiny_model), workspace)
    assert adapter_digest(workspace) == undisturbed[1]


def test_a_stop_before_the_first_step_leaves_nothing_to_save(tiny_model, workspace, undisturbed):
    stop, where = StopSignal(), environment(workspace)
    stop.requested = True
    folder = stage_folder(workspace)
    folder.mkdir(parents=True)
    progress = StoppingProgress(where, stop, None, validating=False)
    with pytest.raises(Interrupted) as interrupted:
        train.run(config_for(tiny_model), Context(where, folder, progress, stop))
    assert (interrupted.value.step, interrupted.value.saved_step) == (0, None)
    assert folders(workspace) == []
    run_train(config_for(tiny_model), workspace)
    assert adapter_digest(workspace) == undisturbed[1]


def test_a_stop_at_a_checkpoint_does_not_write_it_again(tiny_model, workspace):
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), workspace, stop_at=6)
    before = {folder: (stage_folder(workspace) / "checkpoints" / folder).stat().st_ino for folder in folders(workspace)}
    with pytest.raises(Interrupted):  # asked again before a step was finished
        run_train_stopped(tiny_model, workspace)
    after = {folder: (stage_folder(workspace) / "checkpoints" / folder).stat().st_ino for folder in folders(workspace)}
    assert after == before


def run_train_stopped(model, workspace):
    stop, where = StopSignal(), environment(workspace)
    stop.requested = True
    progress = StoppingProgress(where, stop, None, validating=False)
    return train.run(config_for(model), Context(where, stage_folder(workspace), progress, stop))


def test_only_so_many_checkpoints_are_kept(tiny_model, workspace):
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model, checkpoint={"every_steps": 1, "keep": 2}), workspace, stop_at=9)
    assert len(folders(workspace)) == 2
    assert folders(workspace)[-1] == "step-00000009"


def test_accumulation_changes_memory_and_not_the_mean(tiny_model, tmp_path):
    """Rows with very different numbers of counted tokens: a mean of means would weigh them wrongly."""
    uneven = [document(9 * i, 32, prompt=2 if i % 2 else 29) for i in range(16)]
    write_rows(tmp_path, uneven, [document(4, 32)])
    plain = {"max_steps": 4, "validate_every_steps": None, "lora": {"rank": 4, "dropout": 0.0}}
    at_once = run_train(config_for(tiny_model, **plain, batch_size=4, gradient_accumulation=1), tmp_path)
    in_parts = run_train(
        config_for(tiny_model, **plain, batch_size=1, gradient_accumulation=4, identity="b" * 16), tmp_path
    )
    assert in_parts.loss == pytest.approx(at_once.loss, abs=1e-5)
    assert in_parts.validation_loss == pytest.approx(at_once.validation_loss, abs=1e-5)


def test_progress_says_where_it_began_what_is_saved_and_how_fast(tiny_model, workspace):
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), workspace, stop_at=5)
    stop, where = StopSignal(), environment(workspace)
    progress = StoppingProgress(where, stop, None, validating=False)
    train.run(config_for(tiny_model), Context(where, stage_folder(workspace), progress, stop))
    now = progress.now
    assert (now.step, now.total, now.start_step) == (10, 10, 5)
    assert now.saved_step in {5, 6, 9}
    assert now.eta_seconds == 0
    assert now.loss > 0
    assert now.validation_loss > 0
    assert now.tokens_per_second > 0
    assert now.step_seconds > 0
    steps = [fields["step"] for fields in progress.history if "loss" in fields]
    assert steps == [6, 7, 8, 9, 10]


def test_a_disk_that_does_not_take_a_checkpoint_is_said_and_training_goes_on(
    tiny_model, workspace, undisturbed, capsys, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finetune_trainer.training.checkpoint_manager.write_files", full)
    run_train(config_for(tiny_model), workspace)
    said = capsys.readouterr().out
    assert "checkpoint step-00000003 cannot be written: [Errno 28] No space left on device" in said
    assert adapter_digest(workspace) == undisturbed[1]
    assert folders(workspace) == []


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure_that_says_from_where_it_goes_on(
    tiny_model, workspace, undisturbed, monkeypatch
):
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), workspace, stop_at=4)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("finetune_trainer.training.checkpoint_manager.write_files", full)
        with pytest.raises(ServiceUnavailable, match=r"stop at step 8.*No space left.*goes on from step 4"):
            run_train(config_for(tiny_model), workspace, stop_at=8)
    run_train(config_for(tiny_model), workspace)
    assert adapter_digest(workspace) == undisturbed[1]


def test_a_defect_of_the_writer_is_not_swallowed(tiny_model, workspace, monkeypatch):
    def defect(*_):
        raise KeyError("defect")

    monkeypatch.setattr("finetune_trainer.training.checkpoint_manager.write_files", defect)
    for every_steps in (3, 10):  # in the middle, and with the last step
        with pytest.raises(KeyError, match="defect"):
            run_train(config_for(tiny_model, checkpoint={"every_steps": every_steps}), workspace)


def test_seconds_alone_make_a_checkpoint_due(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("finetune_trainer.training.checkpoint_manager.time.monotonic", lambda: clock[0])
    rule = train_config("m", checkpoint={"every_steps": 500, "every_seconds": 30}).checkpoint
    with CheckpointManager(tmp_path / "checkpoints", rule, {}, b"") as checkpoints:
        assert not checkpoints.should_save(7)
        clock[0] += 30
        assert checkpoints.should_save(7)
        assert not checkpoints.should_save(0)
        clock[0] -= 30
        assert checkpoints.should_save(500)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_rises_over_the_warm_up_and_then_follows_the_schedule(schedule):
    recipe = Optimizer(learning_rate=1.0, schedule=schedule, warmup_fraction=0.2)
    rates = [learning_rate(recipe, step, 20) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    if schedule == "constant":
        assert rates[4:] == [1.0] * 16
    else:
        assert rates[4:] == sorted(rates[4:], reverse=True)
        assert 0 < rates[-1] < 0.1
        assert rates[12] == pytest.approx(0.5)


def test_early_stopping_counts_validations_in_a_row_and_survives_its_own_json():
    rule = train_config("m", early_stopping={"patience": 2, "min_delta": 0.1}).recipe.early_stopping
    state = State()
    for loss, stops in [(5.0, False), (4.95, False), (4.8, False), (4.75, False), (4.74, True)]:
        state = State.model_validate_json(state.model_dump_json())
        state.record_step(1.0, 1, 1)
        state.record_validation(loss, rule)
        assert state.stopped_early == stops
    assert (state.best_loss, state.best_step) == (4.74, 5)
