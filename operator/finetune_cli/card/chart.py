"""Charts as SVG. Places are shares of the width, so a text keeps its size on every screen."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from finetune_cli.card.markup import Content, Markup, element, join, listing

# A place is written with one digit behind the point: ten thousand places, finer than any screen.
CURVE_WIDTH = 1000
"""Units of a curve's own coordinates, which the browser stretches to the width of the chart."""
TICKS = 5
"""About so many numbers stand at an axis."""
# Steps that people count in. The 10 is for a step that is just above 5.
ROUND_STEPS = (1, 2, 5, 10)
# Room for the longest name of a stage in the size of style.css; the chart has the rest.
AXIS_WIDTH = 64
"""Pixels beside a chart for the numbers or the names of its rows."""


@dataclass(frozen=True)
class Axis:
    """Maps values to shares of a length, evenly or by their logarithm. `low` is below `high`."""

    low: float
    high: float
    is_logarithmic: bool = False

    @classmethod
    def around(cls, low: float, high: float, margin: float, least: float) -> Self:
        """Return an even axis with room for both values, and `margin` of their distance beside them.

        `least` is the smallest distance.
        """
        # Equal values have no distance: a tenth of their size then keeps the axis from being empty.
        distance = max(high - low, abs(high) / 10, least)
        room = margin * distance
        return cls(low - room, high + room)

    def share(self, value: float) -> float:
        """Return the place of a value, from 0 to 1; values outside are at the ends."""
        low = self._height(self.low)
        high = self._height(self.high)
        inside = min(self.high, max(self.low, value))
        return (self._height(inside) - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return round values between the ends."""
        if self.is_logarithmic:
            return self._decades()
        return self._even()

    def _height(self, value: float) -> float:
        if self.is_logarithmic:
            return math.log(value)
        return value

    def _even(self) -> list[float]:
        raw = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        steps = [power * factor for factor in ROUND_STEPS]
        step = min(step for step in steps if step >= raw)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]

    def _decades(self) -> list[float]:
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        ticks = []
        for power in range(first, last + 1):
            # Without the 10, which is the first tick of the next power.
            ticks += [factor * 10.0**power for factor in ROUND_STEPS[:3]]
        inside = [tick for tick in ticks if self.low <= tick <= self.high]
        # Of many powers of ten, every n-th.
        every = math.ceil(len(inside) / (2 * TICKS))
        return inside[:: max(1, every)]


def chart(
    name: str, title: str, description: str, height: int, *shapes: Content
) -> Markup:
    """Return a chart as wide as its place. `name` is unique in the page; readers of the screen get the description."""
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *shapes,
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        width="100%",
        height=height,
    )


def figure(
    height: int, labels: Iterable[tuple[float, str]], drawn: Markup, caption: Markup
) -> Markup:
    """Return a chart with texts on its left, each at a height in pixels, and its legend below."""
    texts = [label(0.9, y, text, anchor="end") for y, text in labels]
    # The description of the chart has the same, so readers of the screen skip it.
    side = element("svg", *texts, width=AXIS_WIDTH, height=height, aria_hidden="true")
    plot = element("div", side, drawn, class_="plot")
    return element("figure", plot, element("figcaption", caption))


def legend(kinds: Mapping[str, str], *remarks: str) -> Markup:
    """Return the meaning of each kind of mark beside a swatch in its colour, then remarks on the whole chart."""
    entries: list[Content] = []
    for kind, meaning in kinds.items():
        swatch = element("span", class_=f"swatch {kind}", aria_hidden="true")
        entries.append(join((swatch, meaning), " "))
    return listing([*entries, *remarks], "legend")


def percent(share: float) -> str:
    """Return a share as a length in SVG."""
    return f"{100 * share:.4g}%"


def bar(start: float, end: float, top: float, height: float, kind: str) -> Markup:
    """Return a bar between two shares of the width; it is never too thin to be seen."""
    # About a pixel on a narrow screen.
    width = max(end - start, 0.003)
    return element(
        "rect",
        x=percent(min(start, 1 - width)),
        width=percent(width),
        y=f"{top:g}",
        height=f"{height:g}",
        class_=kind,
    )


def dot(x: float, y: float, kind: str, radius: float = 5) -> Markup:
    """Return a round mark."""
    return element(
        "circle",
        cx=percent(x),
        cy=f"{y:.4g}",
        r=radius,
        class_=kind,
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """Return a straight line; x in shares of the width, y in pixels."""
    return element(
        "line",
        x1=percent(x1),
        y1=f"{y1:.4g}",
        x2=percent(x2),
        y2=f"{y2:.4g}",
        class_=kind,
    )


def label(
    x: float, y: float, text: str, kind: str | None = None, anchor: str | None = None
) -> Markup:
    """Return a text; near the ends of the width it stays inside."""
    if anchor is None:
        anchor = "middle"
        if x < 0.1:  # noqa: PLR2004  a tenth has room for half a label
            anchor = "start"
        elif x > 0.9:  # noqa: PLR2004
            anchor = "end"
    return element(
        "text",
        text,
        x=percent(x),
        y=f"{y:.4g}",
        text_anchor=anchor,
        class_=kind,
    )


def curve(points: Sequence[tuple[float, float]], height: int, kind: str) -> Markup:
    """Return a line through points of a share of the width and a height in pixels."""
    return _stretched("polyline", points, height, kind)


def area(points: Sequence[tuple[float, float]], height: int, kind: str) -> Markup:
    """Return the area within such points."""
    return _stretched("polygon", points, height, kind)


def _stretched(
    shape: str, points: Sequence[tuple[float, float]], height: int, kind: str
) -> Markup:
    places = " ".join(f"{CURVE_WIDTH * x:.1f},{y:.1f}" for x, y in points)
    inner = element(
        shape, points=places, class_=kind, vector_effect="non-scaling-stroke"
    )
    return element(
        "svg",
        inner,
        viewBox=f"0 0 {CURVE_WIDTH} {height}",
        preserveAspectRatio="none",
        width="100%",
        height=height,
    )
