"""Nodes that nobody takes away; the pod does not tolerate spot nodes."""

from finetune_operator.placement.base import PodPlacement, Wish, placed


def on_demand(wish: Wish) -> PodPlacement:
    """Place on ordinary nodes."""
    return placed("on-demand", wish, wish.preset.on_demand)
