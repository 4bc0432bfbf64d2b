"""Sizes of files for people, in the units in which disks and downloads are sold: 1 MB is a million bytes."""

UNITS = ("kB", "MB", "GB", "TB")
STEP = 1000


def format_size(size: int) -> str:
    """Return a number of bytes in the largest unit of which there is at least one, with a decimal below 10."""
    if size < STEP:
        return f"{size} B"
    unit = 0
    amount = size / STEP
    # Rounded: 999.9 kB is 1 MB.
    while round(amount) >= STEP and unit + 1 < len(UNITS):
        amount /= STEP
        unit += 1
    digits = 1 if round(amount, 1) < 10 else 0  # noqa: PLR2004  two digits are enough
    return f"{amount:.{digits}f} {UNITS[unit]}"
