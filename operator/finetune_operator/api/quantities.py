"""Amounts of resources as numbers."""

import re
from decimal import Decimal

PREFIXES = {"m": Decimal("0.001"), "": Decimal(1), "k": Decimal(1000)} | {
    prefix: Decimal(1000) ** power
    for power, prefix in enumerate(("M", "G", "T", "P", "E"), start=2)
}
BINARY_PREFIXES = {
    f"{prefix}i": Decimal(1024) ** power
    for power, prefix in enumerate(("K", "M", "G", "T", "P", "E"), start=1)
}


def bytes_or_units(quantity: object) -> Decimal:
    """Return the number of bytes, cores or devices of a quantity; raises ValueError for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", str(quantity))
    factors = PREFIXES | BINARY_PREFIXES
    if match is None or match[2] not in factors:
        raise ValueError(f"{quantity!r} is no quantity")
    return Decimal(match[1]) * factors[match[2]]
