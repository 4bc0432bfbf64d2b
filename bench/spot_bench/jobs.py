"""Jobs that are run on a trace: their work, what a restart costs, their prices and their deadline."""

from dataclasses import dataclass

import numpy as np

PRICES = {"H100": (0.80, 3.10), "H200": (1.19, 2.51), "8 x A100": (11.5, 32.0)}
"""GPU -> dollars an hour on spot and on-demand nodes, as of May 2026; the last one from AWS's list of 2024."""
DEAR_SPOT = ("A100", (1.14, 1.04))


@dataclass(frozen=True)
class Job:
    """A training. Durations in minutes, prices in dollars an hour."""

    work: int
    """Running time on a node that is never taken, without restarts."""
    restart: int
    """From the start of an attempt to its first new step."""
    checkpoint: int
    """Work between two checkpoints; a node that is taken without notice loses what came after the last one."""
    deadline: int
    spot_price: float
    on_demand_price: float
    estimate: float
    """Work that is expected before the speed is measured."""
    speed_error: float = 0.0
    """Relative error of the measured speed."""

    def on_demand_cost(self) -> float:
        """Return the cost of one attempt on on-demand nodes."""
        return (self.work + self.restart) * self.on_demand_price / 60


def draw_job(
    rng: np.random.Generator, prices: tuple[float, float] | None = None
) -> Job:
    """Return a job of 1 to 48 hours, whose deadline is 1.1 to 3 times what it needs on on-demand nodes.

    Short ones are as frequent as long ones: the logarithm of the work is uniform. The estimate is wrong by up to 20 %,
    the measured speed by up to 2 %.
    """
    work = round(60 * 48 ** rng.random())
    restart = int(rng.integers(2, 11))
    spot, on_demand = prices or list(PRICES.values())[rng.integers(len(PRICES))]
    return Job(
        work=work,
        restart=restart,
        checkpoint=int(rng.choice([3, 5, 10, 20])),
        deadline=int(rng.uniform(1.1, 3.0) * (work + restart)),
        spot_price=spot,
        on_demand_price=on_demand,
        estimate=work * rng.uniform(0.8, 1.2),
        speed_error=rng.uniform(-0.02, 0.02),
    )
