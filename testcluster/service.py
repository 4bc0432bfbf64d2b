"""A program that is kept running beside or inside a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Service:
    """What to start, and under which name its log is kept."""

    name: str
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
