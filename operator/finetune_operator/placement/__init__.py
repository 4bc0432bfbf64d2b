"""Where a stage's pod may run: one function a capacity class, named here once.

Adding one is a function in a file of its own and a line in PLACEMENTS; the API's enum, the CRD and the
planner take their values from it.
"""

from collections.abc import Callable

from finetune_operator.placement.base import PodPlacement, Wish
from finetune_operator.placement.on_demand import on_demand
from finetune_operator.placement.spot import spot

PLACEMENTS: dict[str, Callable[[Wish], PodPlacement]] = {
    "on-demand": on_demand,
    "spot": spot,
}

__all__ = ["PLACEMENTS", "PodPlacement", "Wish"]
