"""The state of training besides its tensors; every decision of the loop depends on it alone."""

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from finetune_trainer.contract import EarlyStopping

# In the state and not in memory only: a resumed process must report the same mean.
LOSS_WINDOW = 20
"""Number of optimizer steps over which the reported loss is averaged."""


class State(BaseModel):
    """The counters of a run at a step boundary; saved as state.json."""

    model_config = ConfigDict(extra="forbid")

    step: int = Field(default=0, ge=0)
    """Finished optimizer steps."""
    tokens: int = Field(default=0, ge=0)
    """Tokens seen, without padding."""
    recent_losses: list[tuple[FiniteFloat, int]] = Field(
        default=[], max_length=LOSS_WINDOW
    )
    """(loss sum, number of targets or of pairs) of each of the last steps."""
    validated_step: int | None = None
    """The step of the last validation."""
    validation_loss: FiniteFloat | None = None
    """The loss of the last validation: cross-entropy per target, with the natural logarithm, or DPO's per pair."""
    best_step: int | None = None
    """The step of the adapter with the lowest validation loss so far."""
    best_loss: FiniteFloat | None = None
    """The lowest validation loss so far."""
    early_stopping_best: FiniteFloat | None = None
    """The loss that the next validation must improve on by `minDelta` to reset early stopping."""
    stale_validations: int = Field(default=0, ge=0)
    """Consecutive validations without such an improvement."""
    stopped_early: bool = False
    numerics: dict[str, str] = {}
    """The numeric environment of the process; see `determinism.numeric_environment`."""

    @property
    def loss(self) -> float:
        """Mean loss per target, or per pair, over the last steps."""
        loss_sum = sum(loss for loss, _ in self.recent_losses)
        weight = sum(weight for _, weight in self.recent_losses)
        return loss_sum / max(1, weight)

    def record_step(self, loss_sum: float, weight: int, tokens: int) -> None:
        """Count a finished step: its loss sum, its number of targets or pairs, and its tokens without padding."""
        self.step += 1
        self.tokens += tokens
        self.recent_losses = [*self.recent_losses, (loss_sum, weight)][-LOSS_WINDOW:]

    def record_validation(self, loss: float, rule: EarlyStopping | None) -> bool:
        """Record a validation loss and update early stopping; return whether the loss is the lowest so far."""
        self.validated_step = self.step
        self.validation_loss = loss
        is_best = self.best_loss is None or loss < self.best_loss
        if is_best:
            self.best_step = self.step
            self.best_loss = loss
        if rule:
            self._record_improvement(loss, rule)
        return is_best

    def _record_improvement(self, loss: float, rule: EarlyStopping) -> None:
        # Compared with the last improvement, not with the best loss: small steps that add up to `minDelta` count.
        best = self.early_stopping_best
        if best is None or loss < best - rule.min_delta:
            self.early_stopping_best = loss
            self.stale_validations = 0
        else:
            self.stale_validations += 1
        self.stopped_early = self.stale_validations >= rule.patience
