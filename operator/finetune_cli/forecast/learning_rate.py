"""Warns of a learning rate that is far from the usual rates of the objective."""

from typing import Literal, NamedTuple

from finetune_operator.api.spec import PipelineSpec

Objective = Literal["SFT", "DPO"]


class Rates(NamedTuple):
    """Learning rates after warm-up."""

    lowest: float
    start: float
    """A rate to begin with."""
    highest: float


# TRL's defaults are 1e-6 for DPO and 2e-5 for SFT, both of all weights; an adapter takes about ten times as much.
ADAPTER = {"SFT": Rates(5e-6, 2e-4, 5e-3), "DPO": Rates(1e-7, 5e-6, 1e-4)}
ALL_WEIGHTS = {"SFT": Rates(1e-7, 1e-5, 2e-4), "DPO": Rates(1e-8, 5e-7, 1e-5)}
"""Objective -> rates at whose ends a model of billions of parameters learns nothing, or forgets what it knew."""


def start_rate(objective: Objective) -> float:
    """Return the learning rate to begin with for an adapter."""
    return ADAPTER[objective].start


def learning_rate_line(spec: PipelineSpec) -> str | None:
    """Return the warning for a learning rate far from the usual rates; None if it is near them.

    A program of the user may mean something else by it.
    """
    train = spec.train
    if train.pod.command:
        return None
    trained = "all weights" if train.method == "Full" else "an adapter"
    table = ALL_WEIGHTS if train.method == "Full" else ADAPTER
    rates = table[train.objective]
    rate = train.optimizer.learning_rate
    if rates.lowest <= rate <= rates.highest:
        return None
    side = "above" if rate > rates.highest else "below"
    return (
        f"train: learning rate {rate:g} is far {side} the usual rates of {train.objective} for {trained}; unless the "
        f"model is tiny, set train.optimizer.learningRate to about {rates.start:g}"
    )
