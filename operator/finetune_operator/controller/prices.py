"""The price list: a file that anyone may refresh while the operator runs. A missing or broken list stops nothing."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from finetune_operator.api.placement import PlacementDefaults, PriceList
from finetune_operator.controller.metrics import OLDEST_PRICE
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.translate.api_errors import describe_first_error

# The kubelet takes about a minute to write a changed ConfigMap to it.
REFRESH_SECONDS = 30.0
"""Interval between two reads of the file."""
# Parsing it holds up the event loop.
MAX_CHARACTERS = 65_536
"""Characters of a price list: more than a thousand node classes."""
FORMATS: dict[str, Callable[[str], Any]] = {
    "prices.yaml": yaml.safe_load,
    "prices.json": json.loads,
}
"""File name, which is a key of the ConfigMap -> its parser. The first file that exists counts."""
FIX = 'write date: "YYYY-MM-DD" and prices: {NAME: "0.80"}, where null is a price that is not known'
NO_PRICE = -1.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PriceFile:
    """The file of the list as it was read, so that it is parsed, and logged, once for each change."""

    name: str
    text: str = ""
    error: str = ""
    """Why it cannot be read."""


NEVER_READ = PriceFile("")


class PricedSettings:
    """The operator's settings with the prices of the list in a folder.

    `current` is replaced as a whole, so that a reconcile works with one list from its beginning to its end.
    """

    def __init__(self, configured: Settings, folder: Path | None = None) -> None:
        self.configured = configured
        self.folder = folder
        self.current = configured
        self._file: PriceFile | None = NEVER_READ
        _show_age(configured.placement_defaults)
        self.refresh()

    async def run(self) -> None:
        """Look at the list periodically, forever."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Read the list if it has changed. Raises nothing: a broken list leaves the prices as they are."""
        if self.folder is None:
            return
        file = _read(self.folder)
        if file == self._file:
            return
        self._file = file
        try:
            self._use(_parse(file) if file else None)
        except ValueError as error:
            log.warning(
                "cannot use the price list in %s, prices stay as they are: %s",
                self.folder,
                error,
            )

    def _use(self, prices: PriceList | None) -> None:
        defaults = self.configured.placement_defaults
        if defaults is None:
            return
        if prices is None:
            log.info(
                "no price list in %s: the prices of placement.nodeClasses apply",
                self.folder,
            )
        else:
            known = {node_class.name for node_class in defaults.node_classes}
            unknown = sorted(prices.prices.keys() - known)
            ignored = ""
            if unknown:
                ignored = f"; ignored, because placement.nodeClasses has no {', '.join(unknown)}"
            count = len(prices.prices) - len(unknown)
            log.info("prices of %s for %d node classes%s", prices.date, count, ignored)
            defaults = defaults.with_prices(prices)
        self.current = replace(self.configured, placement_defaults=defaults)
        _show_age(defaults)


def _read(folder: Path) -> PriceFile | None:
    """Return the first file that exists, or None."""
    for name in FORMATS:
        try:
            with (folder / name).open(encoding="utf-8", errors="replace") as file:
                # A character more than the limit shows that the file is too long.
                return PriceFile(name, file.read(MAX_CHARACTERS + 1))
        except FileNotFoundError:
            continue
        except OSError as error:
            return PriceFile(name, error=str(error))
    return None


def _parse(file: PriceFile) -> PriceList:
    """Return the list. Raises ValueError with the invalid field and the fix."""
    if file.error:
        raise ValueError(file.error)
    if len(file.text) > MAX_CHARACTERS:
        raise ValueError(
            f"{file.name}: has more than {MAX_CHARACTERS:,} characters: leave out what is no node class"
        )
    try:
        return PriceList.model_validate(FORMATS[file.name](file.text))
    except ValidationError as error:
        raise ValueError(
            f"{file.name}: {describe_first_error(error, observed=True)}: {FIX}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file.name}: {' '.join(str(error).split())}: {FIX}"
        ) from error


def _show_age(defaults: PlacementDefaults | None) -> None:
    classes = defaults.node_classes if defaults else ()
    dates = [
        node_class.price_date
        for node_class in classes
        if node_class.price is not None and node_class.price_date
    ]
    # The oldest date shows whether any price is stale.
    if dates:
        OLDEST_PRICE.set(datetime.combine(min(dates), time(), UTC).timestamp())
    else:
        OLDEST_PRICE.set(NO_PRICE)
