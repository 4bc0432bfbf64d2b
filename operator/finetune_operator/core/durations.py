"""Durations as people write them: 46s, 13m5s, 3h12m, 2d4h."""

MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def format_duration(seconds: float) -> str:
    """Return the two largest units of a duration, as kubectl does; tenths of a second below one second."""
    if 0 < seconds < 1:
        return f"{max(seconds, 0.1):.1f}s" if seconds < 0.95 else "1s"  # noqa: PLR2004  0.95 rounds to 1.0
    whole = max(0, round(seconds))
    if whole < MINUTE:
        return f"{whole}s"
    if whole < HOUR:
        return _two_units(whole, MINUTE, "m", 1, "s")
    if whole < DAY:
        return _two_units(whole, HOUR, "h", MINUTE, "m")
    return _two_units(whole, DAY, "d", HOUR, "h")


def _two_units(
    seconds: int, large: int, large_name: str, small: int, small_name: str
) -> str:
    rest = seconds % large // small
    return f"{seconds // large}{large_name}" + (f"{rest}{small_name}" if rest else "")
