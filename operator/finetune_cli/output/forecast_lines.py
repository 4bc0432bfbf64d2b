"""Output of a forecast: lines for people, or JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from finetune_cli.forecast.forecast import Forecast, PlannedAction

STYLES: dict[PlannedAction, str] = {
    "reuse": "green",
    "run": "cyan",
    "resume": "yellow",
    "skip": "dim",
    "blocked": "red",
}


def print_forecast(stages: Sequence[Forecast], console: Console) -> None:
    """Print a line for each stage: action, name, reason."""
    for stage in stages:
        style = STYLES[stage.action]
        action = f"[{style}]{stage.action:<7}[/{style}]"
        console.print(f"{action} [bold]{stage.stage:<9}[/bold]", end=" ")
        # Without markup: a reason may name a list entry, as in datasets[0].
        console.print(stage.why, markup=False)


def print_forecast_json(stages: Sequence[Forecast], **more: Any) -> None:
    """Print the forecasts as JSON; `more` adds keys to the object."""
    forecast = {"stages": [vars(stage) for stage in stages], **more}
    print(json.dumps(forecast, indent=1))
