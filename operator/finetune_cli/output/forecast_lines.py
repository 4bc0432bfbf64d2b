"""Output of a forecast: lines for people, or JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

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
        action = Text(f"{stage.action:<7}", STYLES[stage.action])
        name = Text(f"{stage.stage:<9}", "bold")
        console.print(action, name, end=" ")
        # Without markup: a reason may name a list entry, as in datasets[0].
        console.print(stage.reason, markup=False)


def print_forecast_json(stages: Sequence[Forecast], **more: Any) -> None:
    """Print the forecasts as JSON; `more` adds keys to the object."""
    listed = []
    for stage in stages:
        # Programs read these keys, whatever the fields are called here.
        values = {
            "stage": stage.stage,
            "action": stage.action,
            "why": stage.reason,
            "identity": stage.identity,
        }
        listed.append(values)
    forecast = {"stages": listed, **more}
    print(json.dumps(forecast, indent=1))
