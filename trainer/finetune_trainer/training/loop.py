"""The training loop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from finetune_trainer.contract import TrainConfig
from finetune_trainer.runtime.errors import Interrupted, short_reason
from finetune_trainer.runtime.progress.progress import ProgressReporter, log_line
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.tracking.training_metrics import TrainingMetrics
from finetune_trainer.training.batches import StepSampler
from finetune_trainer.training.checkpoints.format import Layout, Snapshot
from finetune_trainer.training.checkpoints.manager import CheckpointManager
from finetune_trainer.training.checkpoints.reader import CheckpointReader
from finetune_trainer.training.determinism import Tensors, seed_generators
from finetune_trainer.training.distributed.ranks import ALONE, PeerLost, Ranks
from finetune_trainer.training.distributed.sharding import (
    copy_to_cpu,
    reserve_copies,
)
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.non_finite import is_finite, non_finite
from finetune_trainer.training.objectives.base import LOSS, MicroBatch, Objective
from finetune_trainer.training.optimizer import NamedOptimizer, clip_gradients
from finetune_trainer.training.samples import SampleGenerator
from finetune_trainer.training.schedule import learning_rate
from finetune_trainer.training.state import State
from finetune_trainer.training.validation import Validator

NOTICE_OF_ANOTHER = "the machine of another process has a notice of its end"
"""The notice that the first process reports for another process, in whose log the text is."""


@dataclass
class TrainingRun:
    """Everything that a run of the training loop works with."""

    config: TrainConfig
    objective: Objective
    sampler: StepSampler
    model: TrainedModel
    optimizer: NamedOptimizer
    validator: Validator
    progress: ProgressReporter
    metrics: TrainingMetrics
    stop: StopSignal
    ranks: Ranks = ALONE
    """The processes that train together."""
    state: State = field(default_factory=State)
    samples: SampleGenerator | None = None
    """Generates texts at validations; None: none are asked for."""
    best: Tensors | None = None
    """The weights with the lowest validation loss so far; None in a process that is not the first."""

    def snapshot(self) -> Snapshot:
        """Return a copy of the state at the last step boundary: it changes only at the end of a step.

        If the state is sharded, all processes must call this together, and only the first gets its tensors.
        """
        return Snapshot(
            state=self.state.model_copy(deep=True),
            weights=copy_to_cpu(self.model.weights, keep=self.ranks.is_first),
            optimizer=copy_to_cpu(self.optimizer.tensors(), keep=self.ranks.is_first),
            best=self.best,
        )

    def reserve_snapshot(self) -> None:
        """Reserve the memory of a snapshot on a GPU's machine, so that the first checkpoint does not wait for it."""
        if self.model.device.type != "cuda" or not self.ranks.is_first:
            return
        layout = self.layout()
        copies = [layout.weights, layout.optimizer]
        if self.validator.has_examples:
            # The best weights so far are kept beside each snapshot.
            copies.append(layout.weights)
        reserve_copies(*copies)

    def copy_weights(self) -> Tensors | None:
        """Return a copy of the weights, or None if this is not the first process; all of them must call this."""
        # Without sharding the first process has all weights. With sharding all processes take part in gathering them.
        if not self.ranks.is_first and not self.ranks.is_sharded:
            return None
        return copy_to_cpu(self.model.weights, keep=self.ranks.is_first) or None

    def trained_weights(self) -> Tensors | None:
        """Return the weights with the lowest validation loss, or the last weights without a validation.

        All processes must call this, and only the first gets them. All have the same state, so all do the same.
        """
        if self.state.best_loss is None:
            return self.copy_weights()
        return self.best

    def layout(self) -> Layout:
        """Return the tensor layout that a checkpoint of this run must have."""
        return Layout(
            self.model.weights,
            self.optimizer.layout(),
            self.sampler.steps,
            self.model.format,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the state at a step boundary."""
        # The learning rate is not restored: each step sets it anew from its number.
        self.model.load(snapshot.weights)
        self.optimizer.restore(snapshot.optimizer)
        self.state = snapshot.state
        self.best = None
        if snapshot.best is not None and self.ranks.is_first:
            self.best = dict(snapshot.best)

    def should_save(self, checkpoints: "Checkpoints") -> bool:
        """Return whether a checkpoint is due: by the decision of the first process, if all take part in saving."""
        is_due = checkpoints.should_save(self.state.step)
        if not self.ranks.is_sharded:
            return is_due
        # The decision depends on the clock of the first process, and all must gather at the same boundary.
        return self.ranks.any(is_due)

    def save_boundary(
        self, checkpoints: "Checkpoints", error: Interrupted
    ) -> int | None:
        """Make the last step boundary durable and return the newest durable step, or None before the first step.

        A sharded boundary cannot be saved if another process was lost. It is gathered from all before it is written,
        which may take longer than the others stay.
        """
        if not self.ranks.is_sharded:
            return checkpoints.save_blocking(self.state.step, self.snapshot)
        if isinstance(error, PeerLost):
            # The lost process had a part of the state, so there is nothing whole to save.
            self.ranks.leave()
            return checkpoints.finish_write()
        if not self.ranks.any(checkpoints.lacks(self.state.step)):
            self.ranks.leave()
            return checkpoints.save_blocking(self.state.step, None)
        # Before the state is gathered: memory has room for a single whole copy. The others wait in the gathering.
        checkpoints.finish_write()
        snapshot = self.snapshot()
        # The others may end now. Writing must not be cut short because they are gone.
        self.ranks.leave()
        return checkpoints.save_blocking(self.state.step, lambda: snapshot)

    def take_notice(self) -> bool:
        """Return whether this process must pass a notice of its machine's end to the first process, which saves."""
        return not self.ranks.is_first and self.progress.early_save.take()

    def is_finished(self) -> bool:
        """Return whether all steps are done or early stopping ended the run."""
        return self.state.step >= self.sampler.steps or self.state.stopped_early

    def raise_if_stop_requested(self) -> None:
        """Raise Interrupted if any process has received a stop signal. All processes must call this together."""
        self.progress.report_work()
        if self.ranks.any(self.stop.requested):
            raise Interrupted

    def raise_if_stop_requested_here(self) -> None:
        """Raise Interrupted if this process has received a stop signal, in work that the others take no part in."""
        if self.stop.requested:
            raise Interrupted


Checkpoints = CheckpointManager | CheckpointReader


def train(run: TrainingRun, checkpoints: Checkpoints) -> None:
    """Train until the run is finished. On a stop signal, save the last step boundary and raise Interrupted.

    Every decision depends only on `run.state` at a step boundary, so a resumed process makes the same decisions.
    """
    run.model.model.train()
    try:
        # To compare with later texts; without validation rows there are none.
        if run.state.step == 0 and run.validator.has_examples:
            generate_samples(run)
        throughput = ThroughputMeter(run, checkpoints)
        while True:
            # Before the validation, which may take long: a kill in it costs no step if a checkpoint was due.
            if run.should_save(checkpoints):
                save(run, checkpoints)
            run.metrics.send(checkpoints.saved_step)
            if run.validator.should_validate(run.state):
                validate(run)
            if run.is_finished():
                return
            with throughput:
                metrics = train_step(run)
            run.metrics.record_step(
                run.state.step,
                {**metrics, "tokens_per_second": throughput.tokens_per_second},
            )
            more = run.objective.progress_of(metrics)
            run.progress.update(
                step=run.state.step, loss_curve=run.metrics.loss_curve(), **more
            )
    except RuntimeError as error:
        if not run.ranks.has_lost_peer(error):
            raise
        raise interrupted(run, checkpoints, PeerLost()) from error
    except Interrupted as error:
        raise interrupted(run, checkpoints, error) from None


def interrupted(
    run: TrainingRun, checkpoints: Checkpoints, error: Interrupted
) -> Interrupted:
    """Save the last step boundary. Return the error with that step and the newest durable step.

    The unfinished step is discarded: weights and optimizer state are still as they were at the boundary.
    """
    saved = run.save_boundary(checkpoints, error)
    run.metrics.send(saved)
    return type(error)(run.state.step, saved)


def save(run: TrainingRun, checkpoints: Checkpoints) -> None:
    """Copy the state at this step boundary, and start to write it. Training waits for nothing else of a checkpoint."""
    checkpoints.save(run.snapshot())


def train_step(run: TrainingRun) -> dict[str, float]:
    """Run an optimizer step and return its metrics.

    The loss is the mean over all targets or pairs of the step, not the mean of the micro-batches' means. Gradient
    accumulation therefore changes only the memory use.
    """
    step = run.state.step
    examples = run.sampler.rows_for_step(step)
    # All are read before the first is computed: their weights are needed for the mean over the step.
    micro_batches = list(
        run.objective.batches(examples, flat=run.model.is_flat, ranks=run.ranks)
    )
    own_weight = sum(batch.weight for batch in micro_batches)
    own_tokens = sum(batch.size for batch in micro_batches)
    # The notice travels with the counts, so it costs no message of its own.
    totals = run.ranks.sum(own_weight, own_tokens, run.take_notice())
    weight, tokens, notices = (int(total) for total in totals)
    if notices and run.ranks.is_first:
        run.progress.announce(NOTICE_OF_ANOTHER)
    sums, norm = compute_gradients(run, micro_batches, weight)
    if not is_finite(sums[0], norm):
        # Nothing has changed yet: the optimizer runs only after the check, so the repetition starts from the boundary.
        (loss_sum, *_), norm_again = compute_gradients(run, micro_batches, weight)
        raise non_finite(
            f"step {step + 1}",
            "the loss sum is {} and the gradient norm {}",
            (sums[0], norm),
            (loss_sum, norm_again),
        )
    rate = learning_rate(run.config.recipe.optimizer, step, run.sampler.steps)
    run.optimizer.step(rate)
    run.state.record_step(sums[0], weight, tokens)
    return {
        **run.objective.means(sums, weight),
        "gradient_norm": norm,
        "learning_rate": rate,
    }


def compute_gradients(
    run: TrainingRun, micro_batches: list[MicroBatch], weight: int
) -> tuple[Sequence[float], float]:
    """Leave the clipped gradient of the step in the parameters; return the sums and the norm before clipping.

    A second call computes the same again: it begins with the same weights and draws the same numbers.
    """
    # With the rank, so that no two processes drop out the same elements.
    seed_generators(run.config.seed, run.state.step, run.ranks.rank)
    own = accumulate_gradients(
        run.objective, run.model, micro_batches, weight, run.raise_if_stop_requested
    )
    sums = run.ranks.sum(*own)
    # Before clipping: the norm of the whole gradient is needed, and then every process clips by the same bits.
    run.ranks.sum_gradients(run.model.trainable.values())
    return sums, clip_gradients(
        run.model.trainable, run.config.recipe.optimizer.max_grad_norm
    )


def accumulate_gradients(
    objective: Objective,
    model: TrainedModel,
    micro_batches: list[MicroBatch],
    weight: int,
    raise_if_stop_requested: Callable[[], None],
) -> list[float]:
    """Accumulate the gradient of the loss, a mean over `weight`; return the sums of loss and metrics."""
    # On the device: reading each micro-batch's sums would make the CPU wait for the GPU.
    sums = torch.zeros(1 + len(objective.metrics), device=model.device)
    for parameter in model.trainable.values():
        parameter.grad = None
    for batch in micro_batches:
        # All processes stop at the same micro-batch, so that none waits for the sum of another.
        raise_if_stop_requested()
        batch_sums = objective.sums(model, batch)
        (batch_sums[0] / max(1, weight)).backward()
        sums += batch_sums.detach()
    return [float(value) for value in sums.tolist()]


def validate(run: TrainingRun) -> None:
    """Compute the validation loss at this step boundary and keep the weights if they are the best so far."""
    run.progress.update(step=run.state.step, note="validating")
    means = run.validator.means(run.model, run.ranks, run.raise_if_stop_requested)
    loss = means[LOSS]
    if not is_finite(loss):
        again = run.validator.means(run.model, run.ranks, run.raise_if_stop_requested)[
            LOSS
        ]
        raise non_finite(
            f"step {run.state.step}", "the validation loss is {}", (loss,), (again,)
        )
    # Before the loss is recorded: a process that stops here validates again.
    generate_samples(run)
    run.metrics.record(
        run.state.step, {f"validation_{name}": value for name, value in means.items()}
    )
    if run.state.record_validation(loss, run.config.recipe.early_stopping):
        run.best = run.copy_weights()
    run.progress.update(
        step=run.state.step,
        validation_loss=loss,
        note="stopping early" if run.state.stopped_early else "",
        loss_curve=run.metrics.loss_curve(),
    )


def generate_samples(run: TrainingRun) -> None:
    """Generate and record texts, if there are prompts. Log an error: no training ends because of its samples."""
    if run.samples is None:
        return
    run.progress.update(step=run.state.step, note="generating samples")
    try:
        raise_if_stop_requested = run.raise_if_stop_requested_here
        if run.ranks.is_sharded:
            # Every process runs the passes of a sharded model, so all must stop at the same token.
            raise_if_stop_requested = run.raise_if_stop_requested
        rows = run.samples.rows(run.model, run.state.step, raise_if_stop_requested)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001  generation of an architecture that only its own code knows
        run.samples = None
        log_line(
            f"train: no samples: {short_reason(error)}; training continues without them"
        )
        return
    run.metrics.record_samples(rows)


class ThroughputMeter:
    """Measures the steps of this process and reports throughput and remaining time as progress."""

    def __init__(self, run: TrainingRun, checkpoints: Checkpoints) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._started = self._seconds = 0.0
        self._start_step = run.state.step
        self._start_tokens = run.state.tokens
        self._reported_saved_step: int | None = None
        self.tokens_per_second = 0.0
        """Mean of the steps of this process."""
        run.progress.update(
            step=run.state.step,
            total=run.sampler.steps,
            start_step=run.state.step,
            saved_step=checkpoints.saved_step,
            loss_curve=run.metrics.loss_curve(),
            note="",
        )

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._seconds += time.monotonic() - self._started
        state = self._run.state
        step_seconds = self._seconds / (state.step - self._start_step)
        self.tokens_per_second = (state.tokens - self._start_tokens) / self._seconds
        last_loss, last_weight = state.recent_losses[-1]
        # Only on change: a report with a saved step is written at once, not rate-limited like the others.
        saved = self._checkpoints.saved_step
        changed = {}
        if saved != self._reported_saved_step:
            changed["saved_step"] = saved
        self._reported_saved_step = saved
        self._run.progress.update(
            step=state.step,
            loss=last_loss / max(1, last_weight),
            tokens_per_second=self.tokens_per_second,
            step_seconds=step_seconds,
            eta_seconds=step_seconds * (self._run.sampler.steps - state.step),
            **changed,
        )
