"""Output of a forecast: lines for people, or JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from finetune_cli.forecast.forecast import Forecast, PlannedAction

STYLES: dict[PlannedAction, str] = {
    "reuse": "green",
    "run": "cyan",
    "resume": "yellow",
    "skip": "dim",
    "blocked": "red",
}


@dataclass(frozen=True)
class PlanReport:
    """What `finetune run`, or applying the manifest to a cluster, would do, and why. Each text is a line."""

    stages: Sequence[Forecast]
    notes: Sequence[str]
    placement: Sequence[str]
    counts: Sequence[str]
    """Records, rows, tokens and steps."""
    estimates: Sequence[str]
    """Memory and time of the training."""
    not_looked_at: Sequence[str] | None = None
    """None on a cluster, whose sources are not looked at."""
    without_effect: Sequence[str] | None = None
    """Fields that this machine ignores; None on a cluster."""
    change: str | None = None
    """What applying the manifest would do to the object on the cluster; None on this machine."""

    def lines(self) -> list[str]:
        """Return the lines below the stages."""
        lines = [*self.placement, *self.counts, *self.estimates, *self.notes]
        lines += self.not_looked_at or ()
        if self.without_effect:
            names = ", ".join(self.without_effect)
            lines.append(f"without effect on this machine: {names}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON; what is not known of this place is left out."""
        values = {
            "stages": [_stage_json(stage) for stage in self.stages],
            "notes": self.notes,
            "counts": self.counts,
            "estimates": self.estimates,
            "notLookedAt": self.not_looked_at,
            "placement": self.placement,
            "withoutEffectHere": self.without_effect,
            "change": self.change,
        }
        return {name: value for name, value in values.items() if value is not None}

    @override
    def __str__(self) -> str:
        stages = [
            f"{stage.action:<7} {stage.stage:<9} {stage.reason}"
            for stage in self.stages
        ]
        return "\n".join([*stages, *self.lines()])


def _stage_json(stage: Forecast) -> dict[str, Any]:
    # Programs read these keys, whatever the fields are called here.
    return {
        "stage": stage.stage,
        "action": stage.action,
        "why": stage.reason,
        "identity": stage.identity,
    }


def print_plan(report: PlanReport, *, as_json: bool) -> None:
    """Print a line for each stage, action, name and reason, and then all other lines; or the JSON."""
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for stage in report.stages:
        action = Text(f"{stage.action:<7}", STYLES[stage.action])
        name = Text(f"{stage.stage:<9}", "bold")
        console.print(action, name, end=" ")
        # Without markup: a reason may name a list entry, as in datasets[0].
        console.print(stage.reason, markup=False)
    for line in report.lines():
        console.print(line, style="dim", markup=False)
