"""Nodes that are cheap because they may be taken away at short notice."""

from finetune_operator.placement.base import PodPlacement, Wish, placed


def spot(wish: Wish) -> PodPlacement:
    """Place on spot nodes, whose taint keeps others away."""
    return placed("spot", wish, wish.preset.spot)
