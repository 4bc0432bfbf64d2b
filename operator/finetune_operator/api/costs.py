"""Running time and money in the status of a pipeline."""

from decimal import Decimal

from finetune_operator.api.amounts import Amount, SignedAmount
from finetune_trainer.contract import ExtensibleModel


class Costs(ExtensibleModel):
    """Running time and money of ended attempts. A sum has only the attempts whose price is known."""

    attempts: int = 0
    """Number of attempts."""
    unpriced: int = 0
    """Number of attempts whose price is not known."""
    seconds: float = 0.0
    """Running time of the attempts, in seconds."""
    spent: Amount = Decimal()
    """Sum of the costs of the attempts with a known price."""
    lost: Amount = Decimal()
    """Part of the costs that interruptions wasted."""
    on_demand: Amount = Decimal()
    """What the same work costs without interruptions on on-demand nodes."""


class PipelineCosts(Costs):
    """Running time and money of all ended attempts of all stages."""

    currency: str
    """Currency of the amounts."""
    saved: SignedAmount = Decimal()
    """What the same work costs on on-demand nodes, less what was spent."""
