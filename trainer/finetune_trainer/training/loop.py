"""The training loop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from finetune_trainer.contract import TrainConfig
from finetune_trainer.data.packing import PackedRows
from finetune_trainer.runtime.errors import ConfigInvalid, Interrupted
from finetune_trainer.runtime.progress import ProgressReporter
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.batches import Batch, StepSampler, batches
from finetune_trainer.training.checkpoint_format import Layout, Snapshot
from finetune_trainer.training.checkpoint_manager import CheckpointManager
from finetune_trainer.training.determinism import Tensors, random_state, restore_random_state
from finetune_trainer.training.model import AdaptedModel, copy_to_cpu
from finetune_trainer.training.optimizer import (
    learning_rate,
    optimizer_layout,
    optimizer_tensors,
    restore_optimizer_tensors,
    set_learning_rate,
)
from finetune_trainer.training.state import State
from finetune_trainer.training.validation import Validator


class Diverged(ConfigInvalid):
    """The loss or a gradient is no number any more; the same steps again would end the same way."""


@dataclass
class TrainingRun:
    """All that training consists of."""

    config: TrainConfig
    rows: PackedRows
    sampler: StepSampler
    model: AdaptedModel
    optimizer: torch.optim.Optimizer
    validator: Validator
    progress: ProgressReporter
    stop: StopSignal
    state: State = field(default_factory=State)
    best: Tensors | None = None
    """The adapter with the lowest validation loss so far."""

    def snapshot(self, generators: Tensors) -> Snapshot:
        """Copy the boundary at which the generators were copied; nothing else changes between two boundaries."""
        return Snapshot(
            state=self.state.model_copy(deep=True),
            adapter=copy_to_cpu(self.model.adapter),
            optimizer=copy_to_cpu(optimizer_tensors(self.optimizer, self.model.trainable)),
            random=generators,
            best=self.best,
        )

    def layout(self) -> Layout:
        """Say what a checkpoint of this run looks like."""
        return Layout(self.model.adapter, optimizer_layout(self.model.trainable), random_state(), self.sampler.steps)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a boundary."""
        self.model.load(snapshot.adapter)
        restore_optimizer_tensors(self.optimizer, self.model.trainable, snapshot.optimizer)
        self.state, self.best = snapshot.state, snapshot.best
        restore_random_state(snapshot.random)

    def is_finished(self) -> bool:
        """Say whether there is no further step to take."""
        return self.state.step >= self.sampler.steps or self.state.stopped_early

    def stop_if_asked(self) -> None:
        """Raise Interrupted where the process was asked to stop."""
        if self.stop.requested:
            raise Interrupted


def train(run: TrainingRun, checkpoints: CheckpointManager) -> None:
    """Take steps until the run is finished; raise Interrupted, the last boundary being saved, when asked to stop.

    Every decision is taken from `run.state` at a boundary, so a process that resumes there takes the same ones.
    """
    pace = ThroughputMeter(run, checkpoints)
    boundary = random_state()
    run.model.model.train()
    try:
        while True:
            if checkpoints.should_save(run.state.step):
                checkpoints.save(run.snapshot(boundary))
            if run.validator.should_validate(run.state):
                validate(run)
            if run.is_finished():
                return
            with pace:
                train_step(run)
            boundary = random_state()
    except Interrupted:
        # The open step is dropped: weights and moments are still those of the boundary, and so are its generators.
        saved = checkpoints.save_blocking(run.state.step, lambda: run.snapshot(boundary))
        raise Interrupted(run.state.step, saved) from None


def train_step(run: TrainingRun) -> None:
    """Move from one boundary to the next.

    The loss is the mean over all counted tokens of the step, however they are spread over its batches, so
    that accumulation changes memory and nothing else.
    """
    recipe, step = run.config.recipe, run.state.step
    parts = list(batches(run.rows, run.sampler.rows_for_step(step), recipe.batch_size))
    counted = sum(len(part.targets) for part in parts)
    nats = accumulate(run.model, parts, counted, run.stop_if_asked)
    norm = clip_gradients(run.model.trainable, recipe.optimizer.max_grad_norm)
    if not (math.isfinite(nats) and math.isfinite(norm)):
        raise Diverged(
            f"step {step + 1}: the loss is {nats / max(1, counted)}, the gradient's norm {norm}: "
            "lower train.optimizer.learningRate, raise warmupFraction, or use precision fp32"
        )
    set_learning_rate(run.optimizer, learning_rate(recipe.optimizer, step, run.sampler.steps))
    run.optimizer.step()
    run.state.record_step(nats, counted, sum(part.size for part in parts))


def accumulate(model: AdaptedModel, parts: list[Batch], counted: int, stop_if_asked: Callable[[], None]) -> float:
    """Leave the gradient of the mean in the parameters; give the sum in nats."""
    nats = torch.zeros((), device=model.device)
    for parameter in model.trainable.values():
        parameter.grad = None
    for part in parts:
        stop_if_asked()
        loss = model.loss_sum(part)
        (loss / max(1, counted)).backward()
        nats += loss.detach()
    return float(nats.item())


def clip_gradients(parameters: dict[str, torch.nn.Parameter], most: float) -> float:
    """Scale the gradients down to a norm of at most `most`, 0 meaning no bound; give the norm they had."""
    norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(list(parameters.values()), most or math.inf)
    return float(norm.item())


def validate(run: TrainingRun) -> None:
    """Measure the validation loss at this boundary and keep the adapter if it is the best so far."""
    run.progress.update(step=run.state.step, note="validating")
    loss = run.validator.loss(run.model, run.stop_if_asked)
    if run.state.record_validation(loss, run.config.recipe.early_stopping):
        run.best = copy_to_cpu(run.model.adapter)
    stopped = "stopping early" if run.state.stopped_early else ""
    run.progress.update(step=run.state.step, validation_loss=loss, note=stopped)


class ThroughputMeter:
    """Times the steps of this process and tells the progress."""

    def __init__(self, run: TrainingRun, checkpoints: CheckpointManager) -> None:
        self._run, self._checkpoints = run, checkpoints
        self._started = self._seconds = 0.0
        self._start_step, self._start_tokens = run.state.step, run.state.tokens
        self._told: int | None = None
        run.progress.update(
            step=run.state.step,
            total=run.sampler.steps,
            start_step=run.state.step,
            saved_step=checkpoints.saved_step,
            note="",
        )

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._seconds += time.monotonic() - self._started
        state = self._run.state
        mean = self._seconds / (state.step - self._start_step)
        # Said only when it changes: it is written out at once, whatever the pace.
        saved = self._checkpoints.saved_step
        news = {} if saved == self._told else {"saved_step": saved}
        self._told = saved
        self._run.progress.update(
            step=state.step,
            loss=state.recent_losses[-1][0] / max(1, state.recent_losses[-1][1]),
            tokens_per_second=(state.tokens - self._start_tokens) / self._seconds,
            step_seconds=mean,
            eta_seconds=mean * (self._run.sampler.steps - state.step),
            **news,
        )
