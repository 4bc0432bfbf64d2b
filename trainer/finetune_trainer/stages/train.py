"""Train the adapter, from the beginning or from the newest checkpoint that is whole."""

import torch

from finetune_trainer.contract import AnyResult, Environment, TrainConfig, TrainResult
from finetune_trainer.data.packing import PackedRows
from finetune_trainer.models.loading import check_context_length, dtype_of, load_base
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid, SourceNotFound
from finetune_trainer.runtime.sources import fetch_model
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.training.batches import StepSampler
from finetune_trainer.training.checkpoint_manager import CheckpointManager, say
from finetune_trainer.training.determinism import numeric_environment, prepare_device, restore_thread_count
from finetune_trainer.training.loop import TrainingRun, train
from finetune_trainer.training.model import (
    ADAPTER,
    ADAPTER_CONFIG,
    AdaptedModel,
    adapter_config,
    attach_adapter,
    check_isolation,
    save_tensors,
)
from finetune_trainer.training.optimizer import adamw
from finetune_trainer.training.validation import Validator

ROWS_AT_ONCE = 4096


def run(config: TrainConfig, context: Context) -> TrainResult:
    """Leave the adapter with the lowest validation loss, in PEFT's format, under `output`.

    Raises ConfigInvalid, DataInvalid, SourceNotFound or Diverged; Interrupted when asked to stop;
    ServiceUnavailable where the last boundary could not be saved then.
    """
    device = prepare_device()
    context.progress.update(note="loading the model")
    rows, validation_rows, rows_digest = open_rows(config, context.environment)
    folder = fetch_model(config.model.uri, config.model.revision, context.environment)
    check_context_length(folder, config.model, rows.context_length)
    base = load_base(folder, dtype_of(config.recipe.precision, folder), config.model.uri)
    for split in (rows, validation_rows):
        check_tokens(split, base)
    peft_model = attach_adapter(base, config.recipe.lora, config.model, config.seed)
    settings = adapter_config(peft_model)
    model = AdaptedModel(peft_model, device, config.recipe)
    check_isolation(model, config.model)
    course = StepSampler.of(config.recipe, len(rows), config.seed)
    run = TrainingRun(
        config=config,
        rows=rows,
        sampler=course,
        model=model,
        optimizer=adamw(config.recipe.optimizer, model.trainable),
        validator=Validator(
            validation_rows, config.recipe.batch_size, config.recipe.validate_every_steps, course.steps
        ),
        progress=context.progress,
        stop=context.stop,
    )
    about = {"identity": config.identity, "rows": rows_digest}
    # From here on SIGTERM is only noted: the loop knows where a boundary is, and the result follows at once.
    with (
        context.stop.deferred(),
        CheckpointManager(context.folder / "checkpoints", config.checkpoint, about, settings) as c,
    ):
        resume(run, c)
        train(run, c)
        return publish(run, context, settings)


def open_rows(config: TrainConfig, environment: Environment) -> tuple[PackedRows, PackedRows, str]:
    """Open what `prepare` packed, every byte of it verified; give both splits and the digest."""
    if config.recipe.early_stopping and not config.recipe.validate_every_steps:
        raise ConfigInvalid("train.earlyStopping looks at validation losses: set train.validateEverySteps")
    folder = environment.stage_dir("prepare", config.prepare) / "output"
    if not folder.is_dir():
        raise SourceNotFound(f"there are no packed rows in {folder}: run the stage prepare first")
    try:
        artifacts.verify(folder)
    except CorruptArtifact as damage:
        raise DataInvalid(f"packed rows: {damage}: delete {folder} and run prepare again") from damage
    rows, validation_rows = PackedRows(folder, "train"), PackedRows(folder, "validation")
    if not len(rows):
        raise DataInvalid(f"{folder} holds no training rows: give the data set usable records")
    if config.recipe.early_stopping and not len(validation_rows):
        raise DataInvalid("train.earlyStopping needs validation rows: raise dataset.validationFraction above 0")
    return rows, validation_rows, artifacts.digest_of(folder)


def check_tokens(rows: PackedRows, base: torch.nn.Module) -> None:
    """Raise DataInvalid where a token is none of the model's, or none counts: that would train on nothing."""
    size = base.get_input_embeddings().num_embeddings
    if len(rows) and not rows.loss_mask.any():
        raise DataInvalid("no token of the packed rows counts for the loss: give the records completions")
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows.tokens[start : start + ROWS_AT_ONCE]
        if part.max() >= size or part.min() < 0:
            wrong = int(part.max() if part.max() >= size else part.min())
            raise DataInvalid(
                f"packed rows hold the token {wrong}, the model knows 0 to {size - 1}: "
                "they were prepared with another model's tokenizer; run prepare with this model"
            )


def resume(run: TrainingRun, checkpoints: CheckpointManager) -> None:
    """Go on from the newest checkpoint that is whole, where there is one, and say so."""
    snapshot = checkpoints.load_latest(run.layout())
    if snapshot is not None:
        restore_thread_count(snapshot.state.numerics.get("threads"))
        run.restore(snapshot)
        say(f"resumed from step {run.state.step} of {run.sampler.steps}")
    then, now = run.state.numerics, numeric_environment(run.model.device)
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name]:
            say(
                f"the checkpoint was made with {name} {then[name]}, this process has {now[name]}: "
                "the last bits of the result may differ from an undisturbed run's"
            )
    run.state.numerics = now


def publish(run: TrainingRun, context: Context, settings: bytes) -> TrainResult:
    """Put the best adapter in its place; without validation the last one is the best."""
    output = context.folder / "output"
    with artifacts.atomic_folder(output) as temporary:
        save_tensors(run.best if run.best is not None else run.model.adapter, temporary / ADAPTER)
        (temporary / ADAPTER_CONFIG).write_bytes(settings)
        digest = artifacts.seal(temporary, {"identity": run.config.identity})
    state = run.state
    return TrainResult(
        identity=run.config.identity,
        digest=digest,
        steps=state.step,
        loss=state.loss,
        validation_loss=state.best_loss,
        best_step=state.step if state.best_step is None else state.best_step,
        tokens=state.tokens,
    )


def is_output_valid(result: AnyResult, config: TrainConfig, environment: Environment) -> bool:
    """Say whether the adapter that an earlier result speaks of is there, whole."""
    return artifacts.matches_digest(environment.stage_dir("train", config.identity) / "output", result.digest)
