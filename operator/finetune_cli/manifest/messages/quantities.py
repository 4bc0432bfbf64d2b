"""Quantities as people write them: 24GB, 24 GiB, 500mb."""

import re
from typing import Any

WRITTEN = re.compile(
    r"(\d+(?:\.\d+)?)\s*([kmgtpe])(i)?(?:b|(?:ilo|ega|iga|era|eta|xa)?bytes?)?",
    re.IGNORECASE,
)
"""Number, prefix, and the sign of a power of 1,024. The case of the letters means nothing here."""
CORES = re.compile(r"(\d+(?:\.\d+)?)\s*v?(?:cores?|cpus?)", re.IGNORECASE)


def kubernetes_forms(text: str) -> tuple[str, ...]:
    """Return how Kubernetes writes a quantity, decimal and binary if both may be meant; empty if it is none."""
    cores = CORES.fullmatch(text.strip())
    if cores:
        return (cores[1],)
    match = WRITTEN.fullmatch(text.strip())
    if match is None:
        return ()
    number, prefix, binary = match.groups()
    binary_prefix = f"{prefix.upper()}i"
    if binary:
        return (f"{number}{binary_prefix}",)
    decimal_prefix = prefix.upper()
    # Kubernetes knows kilo in lower case only.
    if decimal_prefix == "K":
        decimal_prefix = "k"
    return (f"{number}{decimal_prefix}", f"{number}{binary_prefix}")


def corrected(value: Any) -> Any:
    """Return a quantity as Kubernetes writes it; any other value unchanged."""
    if not isinstance(value, str):
        return value
    forms = kubernetes_forms(value)
    if forms:
        return forms[0]
    return value
