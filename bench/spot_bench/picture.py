"""The picture of bench/spot.py: cost of each policy beside the optimum, as an SVG of lines and circles."""

from math import log

COLOURS = {
    "Auto": "#1f6feb",
    "Auto with a probe": "#8250df",
    "Uniform Progress": "#bf8700",
    "greedy": "#1a7f37",
    "always spot": "#cf222e",
    "always on-demand": "#6e7781",
}
LEFT = 120
WIDTH = 560
TOP = 78
LINE = 11
GAP = 14
MISSED = LEFT + WIDTH + 20
TICKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)


def draw(summaries: dict[str, dict[str, tuple[float, float, int]]]) -> str:
    """Return an SVG: for each family and policy a circle at the median and a line to the 95th percentile."""
    rows = []
    y = TOP
    for family, policies in summaries.items():
        rows.append(_text(LEFT - 12, y + LINE * len(policies) / 2 + 4, family, "end"))
        for number, (policy, values) in enumerate(policies.items()):
            rows.append(_row(y + number * LINE + LINE / 2, COLOURS[policy], *values))
        y += LINE * len(policies) + GAP
    body = "\n".join([*_axis(y), *_legend(), *rows])
    size = (
        f'width="{MISSED + 60}" height="{y + 16}" viewBox="0 0 {MISSED + 60} {y + 16}"'
    )
    style = 'font-family="sans-serif" font-size="12" fill="#24292f"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{_background()}\n{body}\n</svg>\n'


def _background() -> str:
    return '<rect width="100%" height="100%" fill="#ffffff"/>'


def _x(ratio: float) -> float:
    """Return the place of a ratio on a logarithmic axis."""
    return LEFT + WIDTH * log(min(max(ratio, 1.0), TICKS[-1])) / log(TICKS[-1])


def _row(y: float, colour: str, median: float, p95: float, missed: int) -> str:
    if median != median:  # noqa: PLR0124  not a number: no run met its deadline
        return _text(MISSED, y + 4, str(missed), "start", colour)
    line = f'<line x1="{_x(median):.1f}" y1="{y}" x2="{_x(p95):.1f}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
    circle = f'<circle cx="{_x(median):.1f}" cy="{y}" r="4" fill="{colour}"/>'
    return (
        line
        + circle
        + (_text(MISSED, y + 4, str(missed), "start", colour) if missed else "")
    )


def _axis(bottom: float) -> list[str]:
    lines = [_text(MISSED, TOP - 8, "missed", "start")]
    for tick in TICKS:
        x = _x(tick)
        dash = ' stroke-dasharray="3 3"' if tick in (1.1, 1.25) else ""
        lines.append(
            f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#d0d7de"{dash}/>'
        )
        lines.append(_text(x, TOP - 8, f"{tick:g}", "middle"))
    return lines


def _legend() -> list[str]:
    parts = [
        _text(
            LEFT,
            18,
            "Cost by the offline optimum: median (circle) to 95th percentile",
            "start",
        )
    ]
    for number, (policy, colour) in enumerate(COLOURS.items()):
        x = 20 + number * 122
        parts.append(
            f'<circle cx="{x}" cy="40" r="4" fill="{colour}"/>'
            + _text(x + 8, 44, policy, "start")
        )
    return parts


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#24292f") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
