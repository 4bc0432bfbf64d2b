"""Stage train: trains an adapter or all weights, from the start or from the latest valid checkpoint."""

import importlib.metadata
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from finetune_trainer.contract import (
    AnyResult,
    Environment,
    PrepareResult,
    TrainConfig,
    TrainResult,
)
from finetune_trainer.contract.metric_rows import METRICS, read_rows
from finetune_trainer.contract.step_size import few_steps
from finetune_trainer.data.chat_templates import read_chat_templates
from finetune_trainer.data.packing.rows import PackedRows, open_prepared
from finetune_trainer.models.base_model import BaseModel, open_base_model
from finetune_trainer.models.loading import check_context_length
from finetune_trainer.models.start_adapter import StartAdapter, open_start_adapter
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    ServiceUnavailable,
)
from finetune_trainer.runtime.machine.allocator import keep_freed_memory
from finetune_trainer.runtime.machine.gpu import check_gpu
from finetune_trainer.runtime.machine.notices import watch_notices
from finetune_trainer.runtime.stage_folder import Context, read_result
from finetune_trainer.tracking.loss_curve import LossCurveBuilder
from finetune_trainer.tracking.registry import open_trackers
from finetune_trainer.tracking.trackers import Trackers
from finetune_trainer.tracking.training_metrics import TrainingMetrics
from finetune_trainer.training.batches import StepSampler
from finetune_trainer.training.checkpoints.manager import CheckpointManager, log_line
from finetune_trainer.training.checkpoints.reader import CheckpointReader
from finetune_trainer.training.determinism import (
    Tensors,
    numeric_environment,
    numeric_fingerprint,
    prepare_device,
    restore_thread_count,
    set_thread_count,
    share_processors,
)
from finetune_trainer.training.distributed.processes import RankProcesses, other_ranks
from finetune_trainer.training.distributed.ranks import Ranks
from finetune_trainer.training.distributed.sharding import shard
from finetune_trainer.training.loop import Checkpoints, TrainingRun, train
from finetune_trainer.training.methods.registry import load_trainable
from finetune_trainer.training.model import document_attention
from finetune_trainer.training.model.model import TrainedModel, check_isolation
from finetune_trainer.training.objectives.base import Objective, Start
from finetune_trainer.training.objectives.registry import objective_of
from finetune_trainer.training.optimizer import create_optimizer
from finetune_trainer.training.requirements import check_validation
from finetune_trainer.training.samples import SampleGenerator
from finetune_trainer.training.validation import Validator

CHECKPOINTS = "checkpoints"
ACCURACY = "rewards/accuracies"
"""DPO's metric that is a field of the progress."""
UNLIKE = (
    "the last bits of their weights may differ, so run all pods on nodes of one kind"
)


def run(config: TrainConfig, context: Context) -> TrainResult | None:
    """Run the stage; write the weights with the lowest validation loss to `output`, in the method's format.

    Of several processes, only the first writes and has a result. Raise ConfigInvalid, DataInvalid, SourceNotFound or
    Diverged. On a signal to stop, raise Interrupted, or ServiceUnavailable if the final checkpoint cannot be saved.
    """
    with other_ranks(config.recipe, context) as others:
        return run_with(others, config, context)


def run_with(
    others: RankProcesses, config: TrainConfig, context: Context
) -> TrainResult | None:
    """Run the stage in this process, together with the others."""
    is_first = context.environment.is_first
    check_gpu(context.environment, others.local_size)
    trackers = open_trackers(config, context) if is_first else Trackers(config.stage)
    rows, validation_rows, rows_digest = open_rows(config, context.environment)
    objective = objective_of(config.recipe, rows)
    validation = objective_of(config.recipe, validation_rows)
    source, start = open_sources(config, context.environment)
    check_context_length(source, rows.context_length)
    model, ranks = load_model(config, context, source, start, others)
    check_tokens((rows, validation_rows), model.vocabulary)
    if rows.packed:
        check_isolation(model, source.uri)
    metadata = {"identity": config.identity, "rows": rows_digest}
    if start:
        metadata["start"] = start.digest
    inputs = artifacts.digest_of_value(metadata | {"model": source.digest})
    begin((objective, validation), model, ranks, context, inputs)
    sampler = StepSampler.of(config.recipe, len(objective), config.seed)
    if is_first:
        warn_of_few_steps(config, sampler)
    samples = None
    # All processes of a sharded model generate together, because each has a part of the weights.
    if is_first or ranks.is_sharded:
        samples = sample_generator(config, context.environment, source)
    run = TrainingRun(
        config=config,
        objective=objective,
        sampler=sampler,
        model=model,
        optimizer=create_optimizer(config.recipe.optimizer, model.trainable),
        validator=Validator(validation, config.recipe.eval_steps, sampler.steps),
        progress=context.progress,
        metrics=TrainingMetrics(context.folder, trackers, sampler.steps, context.fence),
        stop=context.stop,
        ranks=ranks,
        samples=samples,
    )
    # SIGTERM is deferred from here on: the loop stops at a step boundary, and publishing takes little time.
    with (
        context.stop.deferred(),
        open_checkpoints(run, context, source, metadata) as checkpoints,
        run.metrics,
        open_notices(context),
    ):
        weights = train_to_end(run, checkpoints)
        return publish(run, weights, context, source) if weights else None


def progress_of(result: TrainResult, folder: Path) -> dict[str, object]:
    """Return fields of the progress of a training that is done: its loss curve, and DPO's accuracy."""
    rows = read_rows(folder / METRICS)
    curve = LossCurveBuilder(result.steps)
    curve.restart(rows)
    fields: dict[str, object] = {"loss_curve": curve.curve()}
    accuracies = [row.values[ACCURACY] for row in rows if ACCURACY in row.values]
    if accuracies:
        fields["reward_accuracy"] = accuracies[-1]
    return fields


def open_sources(
    config: TrainConfig, environment: Environment
) -> tuple[BaseModel, StartAdapter | None]:
    """Open the base model and the adapter to start from. Raise DataInvalid if prepare read other files."""
    prepare = f"prepare/{config.prepare}"
    source = open_base_model(config.model, environment, config.model_pin)
    source.require(config.model_digest, prepare)
    start = open_start_adapter(config.recipe.start_from, environment, config.start_pin)
    if start:
        start.require(config.start_digest, prepare)
        start.require_base(source)
    return source, start


def warn_of_few_steps(config: TrainConfig, sampler: StepSampler) -> None:
    """Log a warning if each step takes all rows, or if there is a single step by the number of epochs."""
    if config.recipe.max_steps and sampler.rows_per_step <= sampler.rows:
        return
    noun = "pair" if config.recipe.objective == "DPO" else "row"
    warning = few_steps(sampler.steps, sampler.rows, sampler.rows_per_step, noun)
    if warning:
        log_line(f"train: {warning}")


def open_notices(context: Context) -> AbstractContextManager[object]:
    """Watch for notices of the node's end, in the first process of each node."""
    if context.environment.local_rank:
        return nullcontext()
    return watch_notices(context.environment, context.progress.announce)


def train_to_end(run: TrainingRun, checkpoints: Checkpoints) -> Tensors | None:
    """Resume, train and return the trained weights; None in a process that writes none."""
    try:
        resume(run, checkpoints)
        run.reserve_snapshot()
        # Only from here on, so that the memory that loading and resuming have freed goes back to the kernel.
        if run.model.device.type == "cpu":
            keep_freed_memory()
        train(run, checkpoints)
        return run.trained_weights()
    finally:
        # Before the checkpoints are closed, which waits for a checkpoint that is being written.
        run.ranks.leave()


def load_model(
    config: TrainConfig,
    context: Context,
    source: BaseModel,
    start: StartAdapter | None,
    others: RankProcesses,
) -> tuple[TrainedModel, Ranks]:
    """Load the model to this process's device and meet the other processes, over which it may be sharded."""
    share_processors(others.local_size)
    device = prepare_device(strict=True, number=others.local_rank)
    context.progress.update(note="loading the model")
    # A sharded model may not fit into the memory of a single device.
    loading_device = torch.device("cpu") if others.is_sharded else device
    trainable = load_trainable(source, config, loading_device, start)
    ranks = others.join(context.progress)
    # A checkpoint has one thread count, with which all processes resume, on whichever nodes.
    set_thread_count(min(ranks.gather(torch.get_num_threads())))
    if len(set(ranks.gather(numeric_fingerprint(device)))) > 1:
        own = numeric_environment(device)
        log_line(
            f"train: process {ranks.rank} has {own}, and another process differs: {UNLIKE}"
        )
    if ranks.is_sharded:
        trainable = shard(trainable, ranks, device)
    model = TrainedModel(trainable, device, config.recipe)
    document_attention.enable(model, config.recipe.dtype)
    return model, ranks


def open_checkpoints(
    run: TrainingRun, context: Context, source: BaseModel, metadata: dict[str, str]
) -> AbstractContextManager[Checkpoints]:
    """Return the checkpoint manager of the first process, or the reader of another process."""
    if not run.ranks.is_first:
        folder = context.environment.stage_dir("train", run.config.identity)
        return nullcontext(CheckpointReader(folder / CHECKPOINTS, run.ranks))
    return CheckpointManager(
        context.folder / CHECKPOINTS,
        run.config.checkpoint,
        source,
        metadata,
        run.model.format,
        sync_metrics=run.metrics.sync,
        early_save=context.progress.early_save,
        fence=context.fence,
    )


def begin(
    splits: Iterable[Objective],
    model: TrainedModel,
    ranks: Ranks,
    context: Context,
    inputs: str,
) -> None:
    """Start the objectives: they compute values of the untrained model, or read them from the stage's folder."""
    start = Start(model, context.folder, inputs, context.progress, ranks, context.fence)
    for objective in splits:
        objective.begin(start)


def sample_generator(
    config: TrainConfig, environment: Environment, source: BaseModel
) -> SampleGenerator | None:
    """Return the generator of the samples that the config asks for, or None."""
    if config.samples is None:
        return None
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    conversations = isinstance(prepared, PrepareResult) and prepared.conversations
    return SampleGenerator(
        config.samples,
        source.folder,
        conversations=conversations,
        chat_templates=read_chat_templates(environment, config.prepare),
    )


def open_rows(
    config: TrainConfig, environment: Environment
) -> tuple[PackedRows, PackedRows, str]:
    """Open the packed rows of `prepare`; return the training rows, the validation rows and the digest.

    No row is read here. Every row is verified when it is read, so that a resumed process trains at once.
    """
    if config.recipe.early_stopping and not config.recipe.eval_steps:
        raise ConfigInvalid(
            "train.earlyStopping needs repeated validation: set train.evalSteps"
        )
    folder = open_prepared(environment, config.prepare)
    rows = PackedRows(folder, "train")
    validation_rows = PackedRows(folder, "validation")
    if not len(rows):
        raise DataInvalid(
            f"{folder} has no training rows: add valid records to the data set"
        )
    if not len(validation_rows):
        if config.recipe.early_stopping:
            check_validation(config.recipe, "prepare has held out none")
        if config.recipe.eval_steps:
            log_line("train: evalSteps has no effect: there are no validation rows")
    return rows, validation_rows, artifacts.digest_of(folder)


def check_tokens(splits: Iterable[PackedRows], vocabulary: int) -> None:
    """Raise DataInvalid if a token is not in the model's vocabulary, or if no token is a target of the loss."""
    for rows in splits:
        if len(rows) and not rows.target_count:
            raise DataInvalid(
                "no token of the packed rows is a target of the loss: add completions to the records"
            )
        if rows.largest_token >= vocabulary:
            raise DataInvalid(
                f"the packed rows contain token {rows.largest_token}, but the model's vocabulary is 0 to "
                f"{vocabulary - 1}: they may be from another model's tokenizer; run prepare with this model"
            )


def resume(run: TrainingRun, checkpoints: Checkpoints) -> None:
    """Restore the latest valid checkpoint if there is one, and log differences of the numeric environment.

    Raise ServiceUnavailable if a process that is not the first cannot read it.
    """
    try:
        restore(run, checkpoints)
    except CorruptArtifact as error:
        raise ServiceUnavailable(
            "the checkpoint that the first process has verified cannot be read by another process: "
            f"check that all nodes see the same files in spec.workspace: {error}"
        ) from error
    run.metrics.resume(run.state.step, samples=run.samples is not None)
    saved = run.state.numerics
    current = numerics_of(run)
    for name in sorted(saved.keys() & current.keys()):
        if saved[name] != current[name]:
            log_line(
                f"the checkpoint was saved with {name} {saved[name]}, this process has {current[name]}: "
                "the result may differ in its last bits from the result of an uninterrupted run"
            )
    run.state.numerics = current


def restore(run: TrainingRun, checkpoints: Checkpoints) -> None:
    """Restore the latest valid checkpoint if there is one. Raise CorruptArtifact if its files can be read no more."""
    snapshot = checkpoints.load_latest(run.layout())
    # The other processes wait for the step in their load_latest.
    if run.ranks.is_first:
        run.ranks.sum(snapshot.state.step if snapshot else 0)
    if snapshot is not None:
        restore_thread_count(snapshot.state.numerics.get("threads"))
        run.restore(snapshot)
        log_line(f"resumed from step {run.state.step} of {run.sampler.steps}")


def numerics_of(run: TrainingRun) -> dict[str, str]:
    """Return the numeric environment of a run, with the kernels that its model and its recipe use."""
    numerics = numeric_environment(run.model.device)
    numerics["attention"] = run.model.masked_attention
    if run.model.is_flat:
        numerics["attention"] = document_attention.NAME
    if run.config.uses_bitsandbytes():
        numerics["bitsandbytes"] = importlib.metadata.version("bitsandbytes")
    return numerics


def publish(
    run: TrainingRun, weights: Tensors, context: Context, source: BaseModel
) -> TrainResult:
    """Write the weights to `output`. They have the lowest validation loss; without validation, they are the last."""
    output = context.folder / "output"
    with artifacts.atomic_folder(output, fence=context.fence) as temporary:
        run.model.format.write(weights, temporary)
        digest = artifacts.seal(
            temporary, {"identity": run.config.identity, "model": source.digest}
        )
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


def is_output_valid(
    result: AnyResult, config: TrainConfig, environment: Environment
) -> bool:
    """Return whether the trained weights are intact; read every byte of them."""
    return artifacts.matches_digest(
        environment.stage_dir("train", config.identity) / "output", result.digest
    )
