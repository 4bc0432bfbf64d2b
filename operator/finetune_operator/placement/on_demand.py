"""Nodes that nobody takes away; the pod does not tolerate spot nodes."""

from finetune_operator.placement.base import PodPlacement, Wish, own_choice


def on_demand(wish: Wish) -> PodPlacement:
    """Place on ordinary nodes."""
    selector, tolerations = own_choice(wish)
    return PodPlacement("on-demand", selector, tolerations)
