"""What training knows besides its tensors; all decisions of the loop are taken from it."""

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from finetune_trainer.contract import EarlyStopping

LOSS_WINDOW = 20
"""Optimizer steps whose mean is reported as the loss."""


class State(BaseModel):
    """The counters of a run at a step's boundary; saved as state.json."""

    model_config = ConfigDict(extra="forbid")

    step: int = Field(default=0, ge=0)
    """Optimizer steps done."""
    tokens: int = Field(default=0, ge=0)
    """Tokens seen, without padding."""
    recent_losses: list[tuple[FiniteFloat, int]] = Field(default=[], max_length=LOSS_WINDOW)
    """(nats, counted tokens) of each of the last steps."""
    validated_step: int | None = None
    """Where the last validation was."""
    validation_loss: FiniteFloat | None = None
    """What it gave, in nats a token."""
    best_step: int | None = None
    best_loss: FiniteFloat | None = None
    """Of the adapter with the lowest validation loss so far."""
    early_stopping_best: FiniteFloat | None = None
    """The loss that early stopping wants to see undercut."""
    stale_validations: int = Field(default=0, ge=0)
    """Validations in a row that did not undercut it."""
    stopped_early: bool = False
    numerics: dict[str, str] = {}
    """What the last bits depended on; see device.numerics."""

    @property
    def loss(self) -> float:
        """Mean nats per counted token over the last steps."""
        return sum(nats for nats, _ in self.recent_losses) / max(1, sum(counted for _, counted in self.recent_losses))

    def record_step(self, nats: float, counted: int, tokens: int) -> None:
        """Move on to the next boundary."""
        self.step += 1
        self.tokens += tokens
        self.recent_losses = [*self.recent_losses, (nats, counted)][-LOSS_WINDOW:]

    def record_validation(self, loss: float, rule: EarlyStopping | None) -> bool:
        """Take in a validation; say whether it is the best so far."""
        self.validated_step, self.validation_loss = self.step, loss
        best = self.best_loss is None or loss < self.best_loss
        if best:
            self.best_step, self.best_loss = self.step, loss
        if rule:
            undercut = self.early_stopping_best is None or loss < self.early_stopping_best - rule.min_delta
            self.early_stopping_best, self.stale_validations = (
                (loss, 0) if undercut else (self.early_stopping_best, self.stale_validations + 1)
            )
            self.stopped_early = self.stale_validations >= rule.patience
        return best
