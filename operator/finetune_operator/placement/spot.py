"""Nodes that are cheap because they may be taken away at short notice."""

from finetune_operator.placement.base import PodPlacement, Toleration, Wish, own_choice

SPOT_TOLERATION = Toleration(key="spot", operator="Equal", value="true", effect="NoSchedule")


def spot(wish: Wish) -> PodPlacement:
    """Place on spot nodes: tolerate their taint."""
    selector, tolerations = own_choice(wish)
    return PodPlacement("spot", selector, (*tolerations, SPOT_TOLERATION))
