"""Durations in arguments."""

import re

from finetune_cli.diagnostics import UsageError
from finetune_operator.core.durations import HOUR, MINUTE


def parse_timeout(text: str | None) -> float | None:
    """Return the seconds of a --timeout such as 90s, 30m or 1h30m, or None without one; raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or not found:
        raise UsageError(f"--timeout {text!r}: must be a duration such as 90s, 30m or 1h30m")
    return sum(
        int(number) * unit
        for number, unit in zip(found.groups("0"), (HOUR, MINUTE, 1), strict=True)
    )
