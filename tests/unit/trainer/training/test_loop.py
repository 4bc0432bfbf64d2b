"""The training loop: stopping and resuming at step boundaries, checkpoints, progress, and the learning rate."""

from pathlib import Path

import pytest
import torch
from support.trainer.training import (
    StoppingProgress,
    adapter_digest,
    document,
    environment,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)

from finetune_trainer.contract import Checkpoint, Optimizer
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.runtime.errors import Interrupted, ServiceUnavailable
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.checkpoints.format import Snapshot
from finetune_trainer.training.checkpoints.manager import CheckpointManager
from finetune_trainer.training.methods.trainable import WeightsFormat
from finetune_trainer.training.schedule import learning_rate
from finetune_trainer.training.state import State

torch.set_num_threads(1)
FORMAT = WeightsFormat("", {})


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, packed):
    """The result and the adapter digest of ten steps without a checkpoint in between."""
    result = run_train(
        config_for(tiny_model, checkpoint={"every_steps": 1000}, identity="w" * 16),
        packed,
    )
    return result, adapter_digest(packed, "w" * 16)


def config_for(model, **changes):
    return train_config(
        model,
        **{"max_steps": 10, "eval_steps": 4, "checkpoint": {"every_steps": 3}}
        | changes,
    )


def checkpoint_names(workspace):
    return sorted(
        folder.name for folder in (stage_folder(workspace) / "checkpoints").iterdir()
    )


@pytest.mark.parametrize(
    "rule",
    [{"every_steps": 1}, {"every_steps": 3, "keep": 3}, {"every_seconds": 1}],
    ids=str,
)
def test_checkpoint_schedule_does_not_change_the_adapter(
    tiny_model, workspace, uninterrupted, rule
):
    assert run_train(
        config_for(tiny_model, checkpoint=rule), workspace
    ) == uninterrupted[0].model_copy(update={"identity": "a" * 16})
    assert adapter_digest(workspace) == uninterrupted[1]


@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_run_stopped_at_any_step_resumes_exactly(
    tiny_model, workspace, uninterrupted, step
):
    with pytest.raises(Interrupted) as interrupted:
        run_train(config_for(tiny_model), workspace, stop_at=step)
    assert interrupted.value.step == step
    assert interrupted.value.saved_step == step
    result = run_train(config_for(tiny_model), workspace)
    assert result.model_copy(update={"identity": "w" * 16}) == uninterrupted[0]
    assert adapter_digest(workspace) == uninterrupted[1]


@pytest.mark.parametrize("step", [4, 10])
def test_run_stopped_during_validation_resumes_exactly(
    tiny_model, workspace, uninterrupted, step
):
    with pytest.raises(Interrupted) as interrupted:
        run_train(config_for(tiny_model), workspace, stop_at=step, validating=True)
    assert interrupted.value.saved_step == step
    run_train(config_for(tiny_model), workspace)
    assert adapter_digest(workspace) == uninterrupted[1]


def test_stop_before_the_first_step_saves_no_checkpoint(
    tiny_model, workspace, uninterrupted
):
    stop = StopSignal()
    variables = environment(workspace)
    stop.requested = True
    folder = stage_folder(workspace)
    folder.mkdir(parents=True)
    progress = StoppingProgress(variables, stop, None, validating=False)
    with pytest.raises(Interrupted) as interrupted:
        train.run(config_for(tiny_model), Context(variables, folder, progress, stop))
    assert interrupted.value.step == 0
    assert interrupted.value.saved_step is None
    assert checkpoint_names(workspace) == []
    run_train(config_for(tiny_model), workspace)
    assert adapter_digest(workspace) == uninterrupted[1]


def test_stop_at_a_saved_step_does_not_save_it_again(tiny_model, workspace):
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), workspace, stop_at=6)
    before = checkpoint_inodes(workspace)
    with pytest.raises(Interrupted):
        run_train_with_stop_requested(tiny_model, workspace)
    assert checkpoint_inodes(workspace) == before


def checkpoint_inodes(workspace):
    return {
        name: (stage_folder(workspace) / "checkpoints" / name).stat().st_ino
        for name in checkpoint_names(workspace)
    }


def run_train_with_stop_requested(model, workspace):
    stop = StopSignal()
    variables = environment(workspace)
    stop.requested = True
    progress = StoppingProgress(variables, stop, None, validating=False)
    return train.run(
        config_for(model), Context(variables, stage_folder(workspace), progress, stop)
    )


def test_only_the_newest_checkpoints_are_kept(tiny_model, workspace):
    with pytest.raises(Interrupted):
        run_train(
            config_for(tiny_model, checkpoint={"every_steps": 1, "keep": 2}),
            workspace,
            stop_at=9,
        )
    assert len(checkpoint_names(workspace)) == 2
    assert checkpoint_names(workspace)[-1] == "step-00000009"


def test_gradient_accumulation_does_not_change_the_loss(tiny_model, tmp_path):
    """The rows differ widely in their number of targets: a mean of means would weight them wrongly."""
    uneven = [document(9 * i, 32, prompt=2 if i % 2 else 29) for i in range(16)]
    write_rows(tmp_path, uneven, [document(4, 32)])
    recipe = {
        "max_steps": 4,
        "eval_steps": None,
        "lora": {"rank": 4, "dropout": 0.0},
    }
    without = run_train(
        config_for(
            tiny_model, **recipe, micro_batch_size=4, gradient_accumulation_steps=1
        ),
        tmp_path,
    )
    accumulated = run_train(
        config_for(
            tiny_model,
            **recipe,
            micro_batch_size=1,
            gradient_accumulation_steps=4,
            identity="b" * 16,
        ),
        tmp_path,
    )
    assert accumulated.loss == pytest.approx(without.loss, abs=1e-5)
    assert accumulated.validation_loss == pytest.approx(
        without.validation_loss, abs=1e-5
    )


def test_progress_reports_start_saved_step_and_throughput(tiny_model, workspace):
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), workspace, stop_at=5)
    stop = StopSignal()
    variables = environment(workspace)
    progress = StoppingProgress(variables, stop, None, validating=False)
    train.run(
        config_for(tiny_model),
        Context(variables, stage_folder(workspace), progress, stop),
    )
    now = progress.now
    assert now.step == 10
    assert now.total == 10
    assert now.start_step == 5
    assert now.saved_step in {5, 6, 9}
    assert now.eta_seconds == 0
    for number in (
        now.loss,
        now.validation_loss,
        now.tokens_per_second,
        now.step_seconds,
    ):
        assert number
        assert number > 0
    steps = [fields["step"] for fields in progress.history if "loss" in fields]
    assert steps == [6, 7, 8, 9, 10]


def test_checkpoint_write_error_is_logged_and_training_continues(
    tiny_model, workspace, uninterrupted, capsys, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "finetune_trainer.training.checkpoints.manager.write_files", full
    )
    run_train(config_for(tiny_model), workspace)
    log = capsys.readouterr().out
    assert (
        "checkpoint step-00000003 cannot be written: [Errno 28] No space left on device"
        in log
    )
    assert adapter_digest(workspace) == uninterrupted[1]
    assert checkpoint_names(workspace) == []


def test_write_error_of_checkpoint_on_stop_fails_the_stage(
    tiny_model, workspace, uninterrupted, monkeypatch
):
    with pytest.raises(Interrupted):
        run_train(config_for(tiny_model), workspace, stop_at=4)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("finetune_trainer.training.checkpoints.manager.write_files", full)
        with pytest.raises(
            ServiceUnavailable,
            match=r"stop requested at step 8.*No space left.*resume from step 4",
        ):
            run_train(config_for(tiny_model), workspace, stop_at=8)
    run_train(config_for(tiny_model), workspace)
    assert adapter_digest(workspace) == uninterrupted[1]


def test_stop_raises_the_error_of_a_write_not_tried_again(tmp_path, monkeypatch):
    """As for a sharded model whose other processes have left: its state cannot be gathered once more."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "finetune_trainer.training.checkpoints.manager.write_files", full
    )
    with CheckpointManager(
        tmp_path / "checkpoints", Checkpoint(), BaseModel("m", tmp_path, ""), {}, FORMAT
    ) as checkpoints:
        assert checkpoints.lacks(8)
        checkpoints.save(Snapshot(State(step=8), {}, {}, None))
        with pytest.raises(
            ServiceUnavailable,
            match=r"stop requested at step 8.*No space left.*from the beginning",
        ):
            checkpoints.save_blocking(8, None)
        assert checkpoints.lacks(8)


def test_bug_in_checkpoint_writer_is_raised(tiny_model, workspace, monkeypatch):
    def raise_key_error(*_):
        raise KeyError("bug")

    monkeypatch.setattr(
        "finetune_trainer.training.checkpoints.manager.write_files", raise_key_error
    )
    for every_steps in (3, 10):  # during training, and at the last step
        with pytest.raises(KeyError, match="bug"):
            run_train(
                config_for(tiny_model, checkpoint={"every_steps": every_steps}),
                workspace,
            )


def test_checkpoint_is_due_after_every_seconds(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(
        "finetune_trainer.training.checkpoints.manager.time.monotonic", lambda: clock[0]
    )
    rule = train_config(
        Path("m"), checkpoint={"every_steps": 500, "every_seconds": 30}
    ).checkpoint
    with CheckpointManager(
        tmp_path / "checkpoints", rule, BaseModel("m", tmp_path, "sha256:0"), {}, FORMAT
    ) as checkpoints:
        assert not checkpoints.should_save(7)
        clock[0] += 30
        assert checkpoints.should_save(7)
        assert not checkpoints.should_save(0)
        clock[0] -= 30
        assert checkpoints.should_save(500)


def test_kill_costs_three_minutes_by_default(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(
        "finetune_trainer.training.checkpoints.manager.time.monotonic", lambda: clock[0]
    )
    with CheckpointManager(
        tmp_path / "checkpoints", Checkpoint(), BaseModel("m", tmp_path, ""), {}, FORMAT
    ) as checkpoints:
        clock[0] += 179
        assert not checkpoints.should_save(7)
        clock[0] += 1
        assert checkpoints.should_save(7)


@pytest.mark.parametrize("scheduler", ["Cosine", "Linear", "Constant"])
def test_learning_rate_warms_up_then_follows_the_scheduler(scheduler):
    recipe = Optimizer(learning_rate=1.0, scheduler=scheduler, warmup_fraction=0.2)
    rates = [learning_rate(recipe, step, 20) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    if scheduler == "Constant":
        assert rates[4:] == [1.0] * 16
    else:
        assert rates[4:] == sorted(rates[4:], reverse=True)
        assert 0 < rates[-1] < 0.1
        assert rates[12] == pytest.approx(0.5)


def test_stable_schedule_decays_in_the_last_steps_only():
    recipe = Optimizer(
        learning_rate=1.0,
        scheduler="WarmupStableDecay",
        warmup_fraction=0.2,
        decay_fraction=0.25,
    )
    rates = [learning_rate(recipe, step, 20) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:16] == [1.0] * 12
    assert rates[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_stable_schedule_decays_from_a_long_warm_up():
    recipe = Optimizer(
        learning_rate=1.0,
        scheduler="WarmupStableDecay",
        warmup_fraction=0.5,
        decay_fraction=0.9,
    )
    rates = [learning_rate(recipe, step, 20) for step in range(20)]
    assert rates[10:] == pytest.approx(
        [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    )


@pytest.mark.parametrize("scheduler", ["Cosine", "Linear", "WarmupStableDecay"])
def test_decay_ends_at_the_least_learning_rate(scheduler):
    recipe = Optimizer(
        learning_rate=1.0, scheduler=scheduler, min_learning_rate_fraction=0.25
    )
    rates = [learning_rate(recipe, step, 1000) for step in range(1000)]
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.25, abs=0.01)
    assert min(rates[30:]) >= 0.25


def test_early_stopping_state_survives_serialization():
    rule = train_config(
        Path("m"), early_stopping={"patience": 2, "min_delta": 0.1}
    ).recipe.early_stopping
    state = State()
    for loss, stops in [
        (5.0, False),
        (4.95, False),
        (4.8, False),
        (4.75, False),
        (4.74, True),
    ]:
        state = State.model_validate_json(state.model_dump_json())
        state.record_step(1.0, 1, 1)
        state.record_validation(loss, rule)
        assert state.stopped_early == stops
    assert state.best_loss == 4.74
    assert state.best_step == 5
